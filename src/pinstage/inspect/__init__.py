"""Tools to find the slow part of a program.

`audit` looks at a batch before it is moved, `step_times` at the steps of staging. The commands
``pinstage doctor`` and ``pinstage trace`` look at a machine and at a trace of the PyTorch profiler.
None of them needs a GPU.
"""

from .._steps import StepTime, StepTimes, step_times
from ._audit import Audit, LeafCopies, LeafReport, SlabCopy, audit
from ._bus import Bus
from ._narrow import NarrowLeaf
from ._pinning import Pinning

__all__ = [
    "Audit",
    "Bus",
    "LeafCopies",
    "LeafReport",
    "NarrowLeaf",
    "Pinning",
    "SlabCopy",
    "StepTime",
    "StepTimes",
    "audit",
    "step_times",
]
