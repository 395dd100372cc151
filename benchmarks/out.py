"""Time until a batch is in existing tensors: weights, tensors that `to_device` returned, or
separate tensors.

    python benchmarks/out.py --out benchmarks/results/out.json

Compares `Stager.to_device(batch, out=static)` with `to_device` and `torch._foreach_copy_`, as
written by hand, with a loop of ``dst.copy_(src, non_blocking=True)``, with that loop from
page-locked memory, and with new tensors. ``4GiB-weights`` goes by `Stager.load_weights`, through a
cap of 256 MiB. Cases with ``pinned`` have page-locked sources, which pinstage borrows. The
``replay`` cases are loops that write each batch into the inputs of a CUDA graph and replay it;
their times are the loop's, per step. All ways of a case run in one process, in turn: one call of
each, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import pinstage as ps
from comparison import MIB, Args, Call, Outcome, Program, Variant, compare, in_turn, shapes

STEPS = 60
"""Steps of a loop that replays a graph."""
FEWEST_LOOPS, FEWEST_WRITES = 10, 5
PINNED_COPY, GRAPH_ALONE = "pin_copy", "graph"

Tensors = list[torch.Tensor]
Write = Callable[[Tensors, Tensors], Any]


@dataclass(frozen=True)
class Batch:
    """Leaves of one size. They are page-locked if the id ends with `pinned`."""

    id: str
    leaves: int
    leaf_bytes: int
    products: int = 0
    """Matrix products of a graph that is replayed after each write, in a loop; 0: single writes are
    measured.
    """
    dtype: torch.dtype = torch.int32

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.leaves * self.leaf_bytes

    def ends(self, kind: str) -> bool:
        """Return whether the batch is of a kind."""
        return self.id.endswith(kind)


def writes(ids: str) -> list[Batch]:
    """Return batches that are written once in a call."""
    return [Batch(shape.id, shape.leaves, shape.leaf_bytes) for shape in shapes(ids)]


CASES = (
    Batch("4GiB-weights", 64, 64 * MIB),
    Batch("images-37MiB-replay", 2, 37 * MIB // 2, 7, torch.float32),
    Batch("200-leaves-9MiB-replay", 200, 48_000, 3, torch.float32),
    Batch("tokens-1MiB-replay", 2, MIB // 2, 1, torch.int64),
    *writes("""
        1000x256B-returned 1000x256B-separate 4x1KiB 64x64KiB 8x1MiB 300x1MiB 16x16MiB
        4x1KiB-pinned 64x64KiB-pinned 8x1MiB-pinned 300x1MiB-pinned 16x16MiB-pinned
    """),
)
SMALL_CASES = (
    Batch("4MiB-weights", 4, MIB),
    Batch("tokens-replay", 2, 4 << 10, 1, torch.int64),
    *writes("40x256B-returned 40x256B-separate 2x1MiB"),
)


@contextmanager
def _ours(
    device: torch.device, case: Batch, *, write: Callable[[Any, Tensors, Tensors], Tensors]
) -> Iterator[Write]:
    cap = 2 * case.nbytes + MIB
    if write is _in_place and case.ends("weights"):
        write, cap = _load, min(256 * MIB, case.nbytes // 4)
    with ps.Stager(device, max_bytes=cap, borrow_pinned=case.ends("pinned")) as stager:
        yield partial(write, stager)


def _in_place(stager: ps.Stager, sources: Tensors, places: Tensors) -> Tensors:
    return stager.to_device(sources, out=places)


def _load(stager: ps.Stager, sources: Tensors, places: Tensors) -> Tensors:
    named, found = ({str(i): leaf for i, leaf in enumerate(some)} for some in (sources, places))
    stager.load_weights(found, named)
    return places


def _by_hand(stager: ps.Stager, sources: Tensors, places: Tensors) -> Tensors:
    torch._foreach_copy_(places, stager.to_device(sources))
    return places


def _new(stager: ps.Stager, sources: Tensors, _: Tensors) -> Tensors:
    return stager.to_device(sources)


def _copy(*_: Any) -> Write:
    def write(sources: Tensors, places: Tensors) -> Tensors:
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)
        return places

    return write


VARIANTS = (
    Variant(
        "pinstage_out",
        partial(_ours, write=_in_place),
        "`stager.to_device(batch, out=places)`",
        ours=True,
    ),
    Variant(
        "by_hand",
        partial(_ours, write=_by_hand),
        "`torch._foreach_copy_(places, stager.to_device(batch))`",
    ),
    Variant(
        "pinstage", partial(_ours, write=_new), "`stager.to_device(batch)`: new tensors", ours=True
    ),
    Variant("copy", _copy, "`place.copy_(leaf, non_blocking=True)` for each leaf"),
    Variant(
        PINNED_COPY,
        _copy,
        "the same from memory that `pin_memory()` made before",
        needs_cuda=True,
    ),
    Variant(
        GRAPH_ALONE,
        lambda *_: lambda _, places: places,
        "the loops without a write: the graph alone",
        where=lambda case: case.products,
    ),
)


def measure(ways: Sequence[Variant], args: Args, case: Batch) -> dict[str, Outcome | Exception]:
    """Return the seconds of each write, until it is done on the device; of each step if a graph is
    replayed.

    All ways have the same sources, and write into the same places, which one graph reads.
    """
    batches = [_batch(args.device, case, seed) for seed in range(4 if case.products else 1)]
    places = _places(args.device, case, batches[0])
    replay = _graph(places, case.products) if case.products else None
    return in_turn(
        {way.id: _call(way, args.device, case, batches, places, replay) for way in ways},
        args.device,
        repeats=args.repeats,
        seconds=args.seconds,
        fewest=FEWEST_LOOPS if replay else FEWEST_WRITES,
        steps=STEPS if replay else 1,
    )


@contextmanager
def _call(
    way: Variant,
    device: torch.device,
    case: Batch,
    batches: list[Tensors],
    places: Tensors,
    replay: Callable[[], Any] | None,
) -> Iterator[Call]:
    """Yield the call of a way, a write or a loop, once its result is right."""
    if way.id == PINNED_COPY:
        batches = [list(map(torch.Tensor.pin_memory, batch)) for batch in batches]
    with way.open(device, case) as write:

        def call() -> Tensors:
            for step in range(STEPS if replay else 1):
                got: Tensors = write(batches[step % len(batches)], places)
                if replay:
                    replay()
            return got

        call()
        torch._foreach_zero_(places)  # what has been written
        got = call()
        if way.id != GRAPH_ALONE:
            compare(got, batches[-1])
        del got
        yield call


def _batch(device: torch.device, case: Batch, seed: int) -> Tensors:
    count = case.leaf_bytes // case.dtype.itemsize
    made = [torch.full((count,), seed + i, dtype=case.dtype) for i in range(case.leaves)]
    is_pinned = case.ends("pinned") and device.type == "cuda"
    return list(map(torch.Tensor.pin_memory, made)) if is_pinned else made


def _graph(places: Tensors, products: int) -> Callable[[], Any]:
    """Capture a model of matrix products that reads all places; on the CPU, return a function that
    does this.
    """
    device = places[0].device
    weight = (
        torch.rand(4096, 4096, device=device, dtype=torch.bfloat16)
        if device.type == "cuda"
        else torch.rand(8, 8)
    )

    def work() -> torch.Tensor:
        total = sum(place.float().sum() for place in places)
        for _ in range(products):
            torch.mm(weight, weight)
        return total  # type: ignore[return-value]

    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _places(device: torch.device, case: Batch, sources: Tensors) -> Tensors:
    """Return the destinations: each with memory of its own, or as `to_device` returns them."""
    if case.products or case.ends("returned"):
        with ps.Stager(device, max_bytes="64MiB") as stager:
            return stager.to_device(sources)
    return [torch.empty_like(source, device=device) for source in sources]


PROGRAM = Program.of(
    globals(),
    title="ms until a batch is in its place",
    options={
        "repeats": (200, "writes or loops for each variant and case, at most"),
        "seconds": (0.3, "stop after this time for each variant, once a few are done"),
    },
    small={"repeats": 2, "seconds": 0.0},
    in_turn=True,
)
PROGRAM.run(__name__)
