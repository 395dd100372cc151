"""Batches whose tensors are page-locked already, as torch's loader with `pin_memory=True` gives
them: time until all are on the device.

    python benchmarks/page_locked.py --out benchmarks/results/page_locked.json

`batch` is written by hand: one `cuMemcpyBatchAsync` on a stream of its own, into memory that
exists. It needs CUDA 12.8. `bus` is one copy of as many bytes. Each tensor has page-locked memory
of its own. All ways run in one process, in turn: one call of each, again and again. What `batch`
and the others return is compared bit for bit, outside the timer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

import pinstage as ps
from comparison import (
    Args,
    BatchShape,
    Outcome,
    Program,
    Variant,
    bus,
    compare,
    in_turn,
    shapes,
    synchronize,
)

INSTANCES = 2
"""Batches in turn, so that no call reads what the last one left in a cache."""
IN_STREAM_ORDER = 1

Tensors = list[torch.Tensor]
Send = Callable[[Tensors], Tensors]


CASES = shapes("""
    1x128KiB 1x512KiB 1x900KiB 4x250KiB 8x64KiB 8x256KiB 2x1MiB 8x1MiB 1x16MiB 64x64KiB 300x1MiB
    16x16MiB 1000x16KiB 1000x32KiB 1000x64KiB 1000x256KiB
""")
SMALL_CASES = shapes("1x128KiB 10x16KiB")


@contextmanager
def _pinstage(device: torch.device, case: BatchShape, *, borrow: bool) -> Iterator[Send]:  # noqa: ARG001
    with ps.Stager(device, max_bytes="4GiB", borrow_pinned=borrow) as stager:
        yield stager.to_device


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: an access order, hints, and flags."""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


def _batch(device: torch.device, case: BatchShape) -> Send:
    driver = ctypes.CDLL("libcuda.so.1")
    call = getattr(driver, "cuMemcpyBatchAsync_v2", None)  # of CUDA 13
    failed = [] if call else [ctypes.byref(ctypes.c_size_t())]
    call = call or driver.cuMemcpyBatchAsync  # of CUDA 12.8
    stream = torch.cuda.Stream(device)
    handle = ctypes.c_void_p(stream.cuda_stream)
    there = [
        torch.empty(case.leaf_bytes // 8, dtype=torch.int64, device=device)
        for _ in range(case.leaves)
    ]
    addresses, sizes = ctypes.c_void_p * case.leaves, ctypes.c_size_t * case.leaves
    targets = addresses(*(leaf.data_ptr() for leaf in there))
    nbytes = sizes(*[case.leaf_bytes] * case.leaves)
    attributes, begins = Attributes(IN_STREAM_ORDER), ctypes.c_size_t()

    def send(batch: Tensors) -> Tensors:
        sources = addresses(*(leaf.data_ptr() for leaf in batch))
        kinds = ctypes.byref(attributes), ctypes.byref(begins), ctypes.c_size_t(1)
        count = ctypes.c_size_t(case.leaves)
        status = call(targets, sources, nbytes, count, *kinds, *failed, handle)
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {status}")
        return there

    return send


VARIANTS = (
    Variant(
        "to",
        lambda device, _: lambda batch: [leaf.to(device, non_blocking=True) for leaf in batch],
        "`leaf.to(device, non_blocking=True)` for each",
    ),
    Variant("borrow", partial(_pinstage, borrow=True), "`borrow_pinned=True`", ours=True),
    Variant("default", partial(_pinstage, borrow=False), "`to_device(batch)`", ours=True),
    Variant("batch", _batch, "one `cuMemcpyBatchAsync` by hand", needs_cuda=True),
    Variant(
        "bus",
        lambda device, case: bus(device, case.nbytes, case.nbytes)[0],
        "one copy of as many bytes",
    ),
)


def measure(
    ways: Sequence[Variant], args: Args, case: BatchShape
) -> dict[str, Outcome | Exception]:
    """Return the seconds of each batch, until it is on the device."""

    def leaf(first: int) -> torch.Tensor:
        made = torch.arange(first, first + case.leaf_bytes // 8)
        return made.pin_memory() if args.device.type == "cuda" else made

    batches = [
        [leaf(batch * case.leaves + number) for number in range(case.leaves)]  # all are different
        for batch in range(INSTANCES)
    ]
    return in_turn(
        {way.id: _checked(way, args.device, case, batches) for way in ways},
        args.device,
        repeats=args.repeats,
        seconds=args.seconds,
        fewest=7,
        warm_seconds=args.seconds / 4,
        inputs=[(batch,) for batch in batches],
    )


@contextmanager
def _checked(
    way: Variant, device: torch.device, case: BatchShape, batches: list[Tensors]
) -> Iterator[Send]:
    """Yield the call of a way, once its results are right."""
    with way.open(device, case) as send:
        for batch in batches:
            got = send(batch)
            synchronize(device)
            if way.id != "bus":
                compare(got, batch)
            del got
        yield send


PROGRAM = Program.of(
    globals(),
    title="ms until all tensors are on the device",
    options={
        "repeats": (300, "timed calls of each way and batch, at most"),
        "seconds": (0.1, "stop after this time for each way, once 7 are done"),
    },
    small={"repeats": 7, "seconds": 0.0},
    in_turn=True,
    limits=("bus", "batch"),
)
PROGRAM.run(__name__)
