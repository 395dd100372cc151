"""Ways to find what is slow: a batch, the steps of staging, a machine, a recorded trace.

`audit` looks at a batch before it is moved, `step_times` at the steps of staging. The commands ``pinstage doctor`` and
``pinstage trace`` look at a machine and at a trace of the PyTorch profiler. None of them needs a GPU.
"""

from .._steps import StepTime, StepTimes, step_times
from ._audit import Audit, audit
from ._bus import Bus

__all__ = ["Audit", "Bus", "StepTime", "StepTimes", "audit", "step_times"]
