"""Three ways to look at what is slow: a batch, a machine, a recorded trace.

`audit` looks at a batch before it is moved. The commands ``pinstage doctor`` and ``pinstage trace`` look at a machine
and at a trace of the PyTorch profiler. None of them needs a GPU.
"""

from ._audit import Audit, audit
from ._bus import Bus
from ._errors import InspectError, TargetError, TraceError

__all__ = ["Audit", "Bus", "InspectError", "TargetError", "TraceError", "audit"]
