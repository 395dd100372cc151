"""How fast staging is where the platform refuses to page-lock most of the memory that batches need.

    python benchmarks/refusals.py --out benchmarks/results/refusals.json

`ps.Stager` stages batches over memory with a limit: none, 20% and 5% of what the loop page-locks
without a limit, and zero, which is pageable memory. Each variant runs in a fresh process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from comparison import MIB, Args, Outcome, Program, Size, Variant, compare, timed
from pinstage.errors import StagingWarning

CASES = (Size("64MiB", 64 * MIB), Size("512MiB", 512 * MIB))
SMALL_CASES = (Size("2MiB", 2 * MIB), Size("8MiB", 8 * MIB))
AHEAD = 4
"""Batches in page-locked memory at once, without a limit."""
LEAVES = 16

Stage = Any


class WalledMemory:
    """A memory resource that refuses beyond a number of bytes, as a container does."""

    def __init__(self, memory: Any, wall: int) -> None:
        self._memory = memory
        self._left = wall
        self.is_pinned, self.is_shared, self.granularity = (
            memory.is_pinned,
            memory.is_shared,
            memory.granularity,
        )

    def allocate(self, nbytes: int) -> Any:
        """See `ps.memory.MemoryResource`."""
        if nbytes > self._left:
            raise MemoryError(f"the wall leaves {self._left} bytes of {nbytes}")
        block = self._memory.allocate(nbytes)
        self._left -= block.nbytes
        return block

    def deallocate(self, block: Any) -> None:
        """See `ps.memory.MemoryResource`."""
        self._memory.deallocate(block)
        self._left += block.nbytes


@contextmanager
def _stager(share: float, device: torch.device, nbytes: int) -> Iterator[Stage]:
    import pinstage as ps

    wall = WalledMemory(ps.memory.default_memory(device), int(share * AHEAD * nbytes * 1.125))
    with ps.SlabPool(2 * AHEAD * nbytes, memory=wall) as pool:
        yield ps.Stager(device, pool=pool)


def _variant(name: str, share: float) -> Variant:
    about = f"{share:.0%} of what {AHEAD} batches need can be page-locked"
    return Variant(name, partial(_stager, share), about, ours=True)


VARIANTS = (
    _variant("all", 1.0),
    _variant("a_fifth", 0.2),
    _variant("a_twentieth", 0.05),
    _variant("nothing", 0.0),
)


def measure(variant: Variant, args: Args, case: Size) -> Outcome:
    """Return the seconds per batch of each run of `AHEAD` batches."""
    leaf = case.nbytes // LEAVES // 4
    batch = [torch.arange(leaf, dtype=torch.int32).add_(i) for i in range(LEAVES)]
    with warnings.catch_warnings(), variant.open(args.device, case.nbytes) as stager:
        warnings.simplefilter("ignore", StagingWarning)

        def stage() -> Any:
            for _ in range(AHEAD):
                got = stager.to_device(batch)
            return got

        # The first run allocates slabs, or is refused them.
        outcome = timed(stage, args.device, repeats=args.repeats, warm_ups=1, steps=AHEAD)
        compare(stage(), batch)
    return outcome


PROGRAM = Program.of(
    globals(),
    title="ms per batch",
    options={"repeats": (20, "runs of four batches for each variant and size")},
    small={"repeats": 2},
)
PROGRAM.run(__name__)
