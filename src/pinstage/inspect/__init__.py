"""Three ways to look at what is slow: a batch, a machine, a recorded trace.

`audit` looks at a batch before it is moved. The commands ``pinstage doctor`` and ``pinstage trace`` look at a machine
and at a trace of the PyTorch profiler. They use the public names of `pinstage` and the kernel's
figures of the host, change nothing, and need no GPU.
"""

from ._audit import Audit, audit
from ._bus import Bus
from ._errors import InspectError, TargetError, TraceError

__all__ = ["Audit", "Bus", "InspectError", "TargetError", "TraceError", "audit"]
