"""The comparison with rivals: how long until a nested batch is on the device, beside every rival
that is installed.

The shapes of batches (`batches`), the ways to stage them (`rivals`), a process for each way
(`harness`), what that process does (`staging`, `timing`), the rows that come of it (`record`), how
they are shown (`table`, `plot`); `program` puts them in order, with the options of `command`. Of
pinstage it uses the public names only. The names below are those that the programs beside this
folder share.
"""

# ruff: noqa: F401
from comparison.batches import GIB, KIB, MIB, BatchShape, shapes
from comparison.errors import BenchError, Incorrect
from comparison.harness import Outcome, Size, Variant, chosen, importable, ok
from comparison.loop_timer import LoopTimer
from comparison.program import Args, Program, of_module
from comparison.record import Row
from comparison.timing import (
    Call,
    bus,
    compare,
    in_turn,
    kernel,
    resident,
    synchronize,
    timed,
    turns,
)
