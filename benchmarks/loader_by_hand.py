"""A loader by hand: the least work for the main thread of any loader that sends batches itself.

Straight-line code for batches of one shape, in order. Workers stack samples in slots of shared
memory, allocated and page-locked once, and write a byte. The main thread reads the byte, copies,
orders its stream after the copy, and makes views. There is no sampler, no cap, no bound on queued
device work, no error handling and no clean shutdown: use it for comparison only.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

SLOTS = 3
"""Slots per worker."""

Batch = dict[str, torch.Tensor]


class Shape:
    """How the fields of a batch follow one another in a slot, each at a multiple of 512 bytes."""

    def __init__(self, sample: Batch, batch_size: int) -> None:
        self._fields = [
            (key, leaf.dtype, (batch_size, *leaf.shape)) for key, leaf in sample.items()
        ]
        self._keys = list(sample)
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in self._fields]
        self._sizes = [-(-size // 512) * 512 for size in sizes]
        self._equal = self._sizes == sizes and len({field[1:] for field in self._fields}) == 1
        self.nbytes = sum(self._sizes)

    def cut(self, slab: torch.Tensor) -> Batch:
        """Return the fields of a batch, as views of a slab."""
        if self._equal:  # as in most cases here: three calls for all fields
            _, dtype, shape = self._fields[0]
            rows = slab.view(dtype).view(-1, *shape[1:])
            return dict(
                zip(
                    self._keys,
                    torch.unsafe_split_with_sizes(rows, [shape[0]] * len(self._keys)),
                    strict=True,
                )
            )
        pieces = torch.unsafe_split_with_sizes(slab, self._sizes)
        return {
            key: piece[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for piece, (key, dtype, shape) in zip(pieces, self._fields, strict=True)
        }


class Worker:
    """A process, its slots, and a pipe each way: a byte from it means a batch, a byte to it a free
    slot.
    """

    def __init__(self, dataset: Any, batch_size: int, numbers: Sequence[int], shape: Shape) -> None:
        self.slots = [
            torch.frombuffer(mmap.mmap(-1, shape.nbytes), dtype=torch.uint8) for _ in range(SLOTS)
        ]
        self.batches, self._send = os.pipe()
        self._receive, self.free = os.pipe()
        os.write(self.free, bytes(SLOTS))
        self._task = dataset, batch_size, numbers, [shape.cut(slot) for slot in self.slots]
        self.process = multiprocessing.get_context("fork").Process(target=self._work, daemon=True)
        self.process.start()

    def _work(self) -> None:
        torch.set_num_threads(1)
        dataset, batch_size, numbers, slots = self._task
        for turn, number in enumerate(numbers):
            os.read(self._receive, 1)
            samples = [
                dataset[index] for index in range(number * batch_size, (number + 1) * batch_size)
            ]
            for key, out in slots[turn % SLOTS].items():
                torch.stack([sample[key] for sample in samples], out=out)
            os.write(self._send, b"x")

    def end(self) -> None:
        """Kill the process, and close the pipes."""
        self.process.kill()
        self.process.join()
        for end in (self.batches, self._send, self._receive, self.free):
            os.close(end)


@contextmanager
def loaded(
    dataset: Any, batch_size: int, workers: int, device: torch.device
) -> Iterator[Iterator[Batch]]:
    """Yield all batches of a dataset on a device, in order."""
    shape = Shape(dataset[0], batch_size)
    count = len(dataset) // batch_size
    staff = [
        Worker(dataset, batch_size, range(first, count, workers), shape) for first in range(workers)
    ]
    try:
        yield (
            _to_cuda(staff, count, shape, device)
            if device.type == "cuda"
            else _to_cpu(staff, count, shape)
        )
    finally:
        for worker in staff:
            worker.end()


def _to_cuda(
    staff: list[Worker], count: int, shape: Shape, device: torch.device
) -> Iterator[Batch]:
    for worker in staff:  # after the fork
        for slot in worker.slots:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)
            )
    copies, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copying: deque[tuple[torch.cuda.Event, int]] = deque()

    def send(host: torch.Tensor, free: int) -> Batch:
        torch.cuda.set_stream(copies)
        slab = torch.empty(shape.nbytes, dtype=torch.uint8, device=device)
        slab.copy_(host, non_blocking=True)
        event = torch.cuda.Event()
        event.record(copies)
        torch.cuda.set_stream(current)
        copying.append((event, free))
        current.wait_event(event)
        slab.record_stream(current)
        return shape.cut(slab)

    try:
        for number in range(count):
            while copying and copying[0][0].query():
                os.write(copying.popleft()[1], b"x")
            worker, host = _next(staff, number)
            yield send(host, worker.free)
    finally:
        torch.cuda.synchronize(device)
        for worker in staff:
            for slot in worker.slots:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(slot.data_ptr()))


def _to_cpu(staff: list[Worker], count: int, shape: Shape) -> Iterator[Batch]:
    for number in range(count):
        worker, host = _next(staff, number)
        slab = host.clone()
        os.write(worker.free, b"x")
        yield shape.cut(slab)


def _next(staff: list[Worker], number: int) -> tuple[Worker, torch.Tensor]:
    turn, which = divmod(number, len(staff))
    worker = staff[which]
    if not os.read(worker.batches, 1):
        raise RuntimeError(f"worker {which} ended")
    return worker, worker.slots[turn % SLOTS]
