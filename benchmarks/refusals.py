"""How fast staging is where the platform refuses to page-lock most of the memory that batches need.

    python benchmarks/refusals.py --out benchmarks/results/refusals.json

`ps.Stager` stages batches over memory with a limit: none, 20% and 5% of what the loop page-locks
without a limit, and zero, which is pageable memory. Each variant runs in a fresh process.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import script
import torch

from comparison import harness, table
from comparison.harness import Outcome, Size, Variant
from pinstage.errors import StagingWarning

MIB = 1 << 20
CASES = (Size("64MiB", 64 * MIB), Size("512MiB", 512 * MIB))
SMOKE_CASES = (Size("2MiB", 2 * MIB), Size("8MiB", 8 * MIB))
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
    return Variant(name, partial(_stager, share), about, package="pinstage", ours=True)


VARIANTS = (
    _variant("all", 1.0),
    _variant("a_fifth", 0.2),
    _variant("a_twentieth", 0.05),
    _variant("nothing", 0.0),
)


def measure(variant: Variant, repeats: int, device: torch.device, case: harness.Case) -> Outcome:
    """Return the seconds per batch of each run of `AHEAD` batches."""
    leaf = case.nbytes // LEAVES // 4
    batch = [torch.arange(leaf, dtype=torch.int32).add_(i) for i in range(LEAVES)]
    setup: AbstractContextManager[Stage] = variant.setup(device, case.nbytes)
    total = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StagingWarning)
        with setup as stager:
            for repeat in range(repeats + 1):
                start = time.perf_counter()
                for _ in range(AHEAD):
                    got = stager.to_device(batch)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if repeat:  # the first run allocates slabs, or is refused them
                    total.append((time.perf_counter() - start) / AHEAD)
            right = all(
                torch.equal(there.cpu(), here) for there, here in zip(got, batch, strict=True)
            )
            refused = stager.stats().fallback_batches
    status = "ok" if right else "incorrect"
    return {
        "status": status,
        "detail": f"{refused} batches were refused a slab of their size",
        "total": total,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or delivered a wrong byte."""
    parser = script.parser(
        __doc__, repeats=20, repeats_help="runs of four batches for each variant and size"
    )
    args = parser.parse_args(argv)
    script.settle_device(args)
    cases = SMOKE_CASES if args.smoke else CASES
    if args.smoke:
        args.repeats = min(args.repeats, 2)
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        harness.work(cases, partial(measure, variant, args.repeats, device), lambda: None)
        return 0
    variants = script.chosen(args.only, VARIANTS)
    further = ["--smoke"] if args.smoke else []
    rows = script.collect("refusals", __file__, variants, cases, args, further)
    table.grid("ms per batch", rows, "median", "p10", "p90")
    return script.finish("refusals", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
