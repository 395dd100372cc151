r"""A short staging run for compute-sanitizer: stage, check, close; non-zero exit if a bit is wrong.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python benchmarks/sanitize_run.py

Without torch's caching allocator every device slab is its own allocation, so that memcheck sees a
copy beyond its end. `--baseline` does the same with `.to()`: what memcheck reports there is
torch's, not ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from comparison import batches
from comparison.program import choose_device

CPU = torch.device("cpu")
LOCKED = batches.shapes("1x128KiB 8x1MiB 12x64KiB")
"""Batches that are page-locked already."""

SHAPES = batches.shapes("64x1KiB 132x284B 5x3MiB")


def mixed(seed: int) -> batches.Batch:
    """Return a batch of several dtypes and odd sizes, with an empty and a 0-d leaf."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        "image": {"pixels": (random(3, 7, 5) * 255).to(torch.uint8), "mask": random(7, 5) > 0.5},
        "stream": {
            "values": random(1001).double(),
            "ids": (random(17) * 1e6).long(),
            "half": random(33).bfloat16(),
        },
        "edge": {"scalar": random(1)[0].clone(), "empty": random(0, 4), "turned": random(9, 6).t()},
    }


def runs() -> Iterator[list[batches.Batch]]:
    """Yield lists of batches; batches of one list are staged back to back."""
    for shape in SHAPES:
        yield [batches.build(shape, seed) for seed in range(3)]
    yield [mixed(seed) for seed in range(3)]


def replayed(stager: Any, sources: list[batches.Batch]) -> Iterator[Any]:
    """Yield what a graph has copied from its static input, which ``out=`` fills for each batch."""
    static = stager.to_device(sources[0])
    results = tree_map(torch.empty_like, static)
    copies = list(zip(tree_leaves(results), tree_leaves(static), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for result, leaf in copies:  # allocates nothing, for there is no caching allocator
            result.copy_(leaf)
    for source in sources:
        stager.to_device(source, out=static)
        graph.replay()
        yield tree_map(torch.clone, results)


Results = Iterator[tuple[list[batches.Batch], list[Any]]]
"""Batches, and what they became."""


def moved(device: torch.device) -> Results:
    """Yield what `.to()` makes of each batch."""
    if device.type == "cuda":
        from cuda.bindings import driver

        driver.cuInit(0)  # as loading cuda-python does
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    for sources in runs():
        yield sources, [batches.map_leaves(source, move) for source in sources]


def staged(stager: Any, device: torch.device) -> Results:
    """Yield staged batches, on the current stream and on another one."""
    for sources in runs():
        yield sources, list(map(stager.to_device, sources))
        yield sources, list(stager.prefetch(sources, depth=2))
        if device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                results = [stager.stage(source).wait() for source in sources]
            yield sources, results
            yield sources, list(replayed(stager, sources))


def borrowed(stager: Any, borrowing: Any, device: torch.device) -> Results:
    """Yield staged batches that were page-locked before."""
    for shape in LOCKED if device.type == "cuda" else ():
        sources = [batches.build(shape, 0)]
        locked = [tree_map(torch.Tensor.pin_memory, source) for source in sources]
        for mover in (stager, borrowing):
            yield sources, list(map(mover.to_device, locked))
            yield sources, [mover.stage(source).wait() for source in locked]


def fetched(stager: Any, small: Any) -> Results:
    """Yield batches that came back to the host, whole and in part, by two stagers."""
    for sources in runs():
        few = [dict(list(source.items())[:3]) for source in sources]
        for some in (sources, few):
            there = list(map(stager.to_device, some))
            started = [
                [stager.fetch(batch, copy=copy) for batch in there] for copy in (False, True)
            ]
            for transfers in started:
                yield some, [transfer.result() for transfer in transfers]
            for mover in (stager, small):
                yield some, list(map(mover.to_host, there))


def pinstage(device: torch.device) -> Iterator[tuple[torch.device, Results]]:
    """Yield all that is tested, with the device of its results."""
    import pinstage as ps

    with ps.Stager(device, max_bytes="256MiB") as stager:
        yield device, staged(stager, device)
        borrowing = ps.Stager(device, pool=stager.pool, borrow_pinned=True)
        yield device, borrowed(stager, borrowing, device)
        with ps.Stager(device, max_bytes="8MiB") as small:  # results are larger than its slabs
            yield CPU, fetched(stager, small)


def main() -> int:
    """Stage everything, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--baseline", action="store_true", help="stage with .to() instead")
    args = parser.parse_args()
    device = choose_device(args.device)
    wrong: list[str] = []
    count = 0
    for where, found in [(device, moved(device))] if args.baseline else pinstage(device):
        for sources, results in found:
            for source, result in zip(sources, results, strict=True):
                wrong.extend(batches.differences(source, result, where))
                count += 1
    print(f"{count} batches staged on {device}, {len(wrong)} leaves wrong")
    for line in wrong[:20]:
        print(line)
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
