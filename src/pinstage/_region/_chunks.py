"""The chunks of a region: touched and page-locked by one thread, given back by another one.

CUDA refuses a copy that touches two registrations, so users of a region have to know where chunks
end. A single registration would avoid that, but it holds the driver's locks as long as it runs. 48
GiB at once stop the calls of a neighbour for 700 ms, and launches in this process for 1,300 ms.
Chunks of 128 MiB stop them for 11 to 16 ms, and 24 to 44 ms. Chunks of 64 MiB stop them for 3 to 7
ms, and 13 to 22 ms, and take a fifth longer in all.

The reaper calls `Chunks.reap` when the last view is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from .._memory import REFUSALS, HostRange, disregard_captures, remedy
from .._pool import Claim, Fence
from .._reaper import UninterruptedCall, begin, ending, running, warn
from .._sizes import format_bytes
from ..errors import ClosedError, PinningError, PinstageError, StagingWarning

_POLL_SECONDS = 1e-3
"""Interval at which `Chunks.wait` checks. A chunk takes milliseconds."""

_PAUSE_SECONDS = 0.01
"""Pause between unregistering two chunks: each call may wait for the device, and stop launches
meanwhile.
"""

Progress = Callable[[int, int], object]

_living: dict[int, Chunks] = {}
"""The chunks in use, by `id`, in which stagers look for the memory of a tensor."""


class Chunks:
    """Memory whose parts are page-locked one after the other.

    It holds nothing before `begin`.

    Args:
        memory: the memory, which this object then owns.
        divide: returns where chunks end, once the memory is mapped; the last end is the memory's.
        progress: called after each chunk with the bytes that are ready and the total.
        claim: what counts the memory in a budget; None without one.

    Attributes:
        ends: where chunks end.
        kind: "registered", "allocated" or "pageable"; empty until the first chunk has decided it.
        reason: why it isn't registered; empty if it is.
        ready: bytes from the beginning that are touched, and page-locked if the kind is.
        pid: the process that it belongs to.
        guards: events of work that uses the memory, as `add_guard` adds them.
    """

    def __init__(
        self,
        memory: HostRange,
        divide: Callable[[], tuple[int, ...]],
        progress: Progress | None,
        claim: Claim | None,
    ) -> None:
        self.memory, self.kind, self.reason, self.ready = memory, "", memory.reason, 0
        self.ends: tuple[int, ...] = ()
        self._divide = divide
        self.guards: dict[int, Fence] = {}
        self.claim, self._progress, self.pid = claim, progress, os.getpid()
        self._error: BaseException | None = None
        self._registered: list[tuple[int, int]] = []
        self._is_over, self._stops = True, False

    def begin(self) -> None:
        """Map the memory, let the first chunk decide what kind it is, and start the thread that
        does the rest.

        Blocks. Call it in a thread that no interrupt reaches.

        Raises:
            MemoryError, OSError: the kernel ran out of memory.
            Exception: as `Claim.take`.
        """
        memory, claim = self.memory, self.claim
        inode = memory.inode()
        if claim is not None:  # before there is memory, which a forked child may inherit
            claim.take(inode)
        memory.map()
        if claim is not None and inode != memory.inode():
            claim.share(memory.inode())
        self.ends = self._divide()
        if memory.device >= 0:
            disregard_captures()
        self._decide()
        if self.ready < self.ends[-1]:
            self._is_over = False
            try:
                UninterruptedCall(self._run).begin()
            except (MemoryError, RuntimeError):
                self._is_over = True  # else `reap` would wait for the thread
                raise
        _living[id(self)] = self

    def is_ready(self, nbytes: int) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return self.ready >= nbytes or self._is_over

    def wait(self, nbytes: int, timeout: float | None) -> None:
        """Wait until bytes from the beginning are ready.

        Raises:
            PinningError: a later chunk was refused.
            ClosedError: the region was closed before.
            TimeoutError: they aren't ready in time.
        """
        if not self._wait(nbytes, math.inf if timeout is None else timeout):
            ready = f"{format_bytes(self.ready)} of {format_bytes(nbytes)} ready"
            remedy = "wait longer or for less"
            raise TimeoutError(f"the region isn't ready after {timeout} s: {ready}; {remedy}")
        if self.ready < nbytes:
            raise self._why_never_ready() from self._error

    def _why_never_ready(self) -> PinstageError:
        if isinstance(self._error, REFUSALS):
            return PinningError(self.reason)
        if self._error is not None:
            ended = f"the region isn't ready, and its thread has ended: {self._error!r}"
            return PinningError(f"{ended}; make another one")
        return ClosedError("the region was closed before it was ready; make another one")

    def _wait(self, nbytes: int, seconds: float) -> bool:
        """Wait until bytes are ready, or will never be; return False if that takes longer."""
        deadline = time.monotonic() + seconds
        while not self.is_ready(nbytes):
            if time.monotonic() >= deadline:
                return False
            # Not a `threading.Condition`: an interrupt may leave its lock locked.
            time.sleep(_POLL_SECONDS)
        return True

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges in which CUDA can copy bytes, once they are ready; none if they are
        pageable. Blocks.
        """
        self._wait(end, math.inf)
        if self.kind == "pageable" or self.ready < end:
            return []
        borders = self.inside(start, end) if self.kind == "registered" else ()
        return list(pairwise((start, *borders, end)))

    def inside(self, start: int, end: int) -> tuple[int, ...]:
        """Return the ends of chunks between two bytes."""
        return self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, end - 1)]

    # -- the thread that page-locks

    def _run(self) -> None:
        memory = self.memory
        try:
            running[self] = None
            if memory.device >= 0:
                disregard_captures()
            with ThreadPoolExecutor(1, "pinstage-touch") as ahead:
                # It touches a chunk while the one before is registered.
                chunks = list(pairwise(self.ends))
                touching = ahead.submit(memory.touch, *chunks[0])
                for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
                    if self._stops or ending:
                        break
                    touching.result()
                    if following is not None:
                        touching = ahead.submit(memory.touch, *following)
                    if self.kind == "registered":
                        self._register(*chunk)
                    self._advance(chunk[1])
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
            if isinstance(error, REFUSALS):  # not if a thread can't be started at the program's end
                self._become_pageable(error)
        finally:
            running.pop(self, None)
            self._is_over = True

    def _decide(self) -> None:
        """Use the first chunk to decide what kind of memory this is: registered, else allocated,
        else pageable.
        """
        memory, end, kind = self.memory, self.ends[0], "pageable"
        if crawled := memory.touch_first(end):
            warn(crawled)
        if not self.reason:
            try:
                self._register(0, end)
                kind = "registered"
            except PinningError as error:
                self.reason = f"{error}; {remedy(memory.nbytes)}"
        if kind == "pageable" and memory.device >= 0 and not memory.is_shared:
            with contextlib.suppress(RuntimeError):
                memory.allocate()
                kind, end = "allocated", self.ends[-1]
        if kind == "pageable" and memory.device >= 0:
            warn(f"a region is pageable, which makes copies slow: {self.reason}")
        self.kind = kind
        self._advance(end)

    def _register(self, start: int, end: int) -> None:
        self.memory.register(start, end)
        self._registered.append((start, end))

    def _advance(self, end: int) -> None:
        self.ready = end
        try:
            if self._progress is not None:
                self._progress(end, self.ends[-1])
        except BaseException as error:  # noqa: BLE001 - the memory doesn't depend on it, and SystemExit ends no thread
            self._progress = None
            warn(f"progress= of a region isn't called again, since it raised {error!r}")

    def _become_pageable(self, error: BaseException) -> None:
        """Unregister all, since a later chunk was refused: copies of it would be slow, and copies
        across it fail.
        """
        nbytes = self.ends[-1]
        done = f"{format_bytes(self.ready)} of {format_bytes(nbytes)}"
        text = f"page-locking was refused after {done}: {error}; {remedy(nbytes)}"
        self.kind, self.reason, self.ready = "pageable", text, 0
        warn(f"a region is pageable, which makes copies slow: {text}")
        self._unregister()

    # -- the end

    def reap(self) -> bool:
        """Give the memory back, unless it is in use. The reaper calls this when the last view is
        gone.
        """
        self._stops = True
        _living.pop(id(self), None)
        if not self._is_over or not all(guard.query() for guard in list(self.guards.values())):
            return False
        try:
            UninterruptedCall(self._free).begin()
        except (MemoryError, RuntimeError):  # too many threads; the reaper tries again
            return False
        return True

    def _free(self) -> None:
        if self.memory.device >= 0:
            disregard_captures()
        if self._unregister() and begin(self):
            self.memory.free()
            running.pop(self)
            if self.claim is not None:
                self.claim.release()

    def _unregister(self) -> bool:
        """Unregister all chunks, with pauses; return whether the memory can be given back."""
        is_free = True
        while self._registered and begin(self):
            with contextlib.suppress(StagingWarning):  # if it is turned into an error
                is_free = self.memory.unregister(*self._registered.pop()) and is_free
            running.pop(self)
            time.sleep(_PAUSE_SECONDS)
        return is_free


def pieces_at(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges in which CUDA can copy memory of a region without the host.

    They end where chunks do. This call waits until the chunks are ready.

    Returns:
        Offsets in bytes from the address: where each range begins and ends. Empty if the memory is
        pageable or in no region.
    """
    for chunks in list(_living.values()):
        start = address - chunks.memory.address
        if 0 <= start < chunks.memory.nbytes:
            return [(a - start, b - start) for a, b in chunks.pieces(start, start + nbytes)]
    return []


def pieces_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Do the same for a dense tensor, which may be page-locked outside of any region."""
    pieces = pieces_at(tensor.data_ptr(), tensor.nbytes)
    return pieces or ([(0, tensor.nbytes)] if tensor.is_pinned() else [])
