"""How a batch's bytes get into a slab quickly: by several threads, and in chunks that travel while the next is packed.

The slab's bytes are cut into pieces of a megabyte or more. Pieces of small leaves are taken by threads of ours, one
after the other, the calling thread among them. Pieces of large leaves are copied by torch's threads, one after the
other for the calling thread: they do not have to pass the interpreter lock around. Consecutive pieces make a chunk;
when all of it is moved, it can travel. Most batches are one chunk, and small ones a single thread's work.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import torch

from ._layout import Moves, Piece, Table

MAX_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took 8.7 ms with 12 and 8.8 ms with 16 on the reference machine."""

PARALLEL_FROM_BYTES = 4 * 1024 * 1024
"""Below this size a second thread gains nothing: waking it and passing the interpreter lock around take 0.1 ms."""

BYTES_PER_THREAD = 16 * 1024 * 1024
"""From there on there are two threads, and one more for each of these. More are slower until there is work for all: 64
MiB took 2.4 ms with 4 threads and 3.1 ms with 12, 300 MiB 18 ms with 4 and 10 to 12 ms with 12."""

TORCH_THREADS_FROM = 4
"""With fewer threads of torch's (``torch.get_num_threads()``; torchrun sets 1) large leaves are left to ours as well.
Packed in chunks, each copied at once, 64 leaves of 1 MiB took 1.5 ms with 16 threads of torch's and 2.4 to 3 ms with
any number of ours; leaves of 256 KiB are too small for torch's (benchmarks/NOTES.md)."""

CHUNK_BYTES = 16 * 1024 * 1024
"""The smallest chunk: long enough that the copy call (8 us) and the hand-over between threads do not show."""

MAX_CHUNKS = 6
"""More chunks only cost hand-overs: with six, at most 1/6 of the copy is not hidden behind the packing."""


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many cpus this process may use: its affinity, and its cgroup's quota where there is one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here, or no quota
    return cpus


class Packer:
    """Moves batches into slabs with a number of threads, which are kept until `close`.

    Args:
        threads: how many move bytes, the calling one included; None takes the usable cpus, at most `MAX_THREADS`.
        large_by_torch: leave large leaves to torch's threads where there are `TORCH_THREADS_FROM`; None: if `threads`
            is None, since a number given is a limit.

    Raises:
        ValueError: `threads` is less than 1.

    May be used by several threads at once.
    """

    def __init__(self, threads: int | None = None, *, large_by_torch: bool | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1: {threads}; 1 packs in the calling thread")
        self.threads = min(usable_cpus(), MAX_THREADS) if threads is None else threads
        self._large_by_torch = threads is None if large_by_torch is None else large_by_torch
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def pack(self, table: Table, tensors: list[torch.Tensor], slab: torch.Tensor) -> Iterator[int]:
        """Write tensors to their places in a slab, and report progress.

        Args:
            table: the offset table.
            tensors: on the CPU, as the table describes them; the caller keeps them alive and unchanged meanwhile.
            slab: uint8 ``[>= table.nbytes]`` on the CPU.

        Yields:
            Offsets, rising, the last one ``table.nbytes``: all bytes before it are in the slab. More than one only for
            batches of two `CHUNK_BYTES` and more. The iterator has to be exhausted or closed; closing waits for the
            threads.
        """
        moves = Moves(table, tensors, slab)
        if self.threads == 1 or table.raw_end < PARALLEL_FROM_BYTES:
            moves.everything()
            yield table.nbytes
            return
        moves.gather()
        large_by_torch = self._large_by_torch and torch.get_num_threads() >= TORCH_THREADS_FROM
        job = _Job(moves, table.raw_end, large_by_torch=large_by_torch)
        if job.shared_bytes >= PARALLEL_FROM_BYTES:
            self._start(min(self.threads - 1, 1 + job.shared_bytes // BYTES_PER_THREAD), job)
        try:
            for end in job.work_and_wait():
                yield end if end < table.raw_end else table.nbytes
        finally:
            job.end()

    def close(self) -> None:
        """End the threads; waits for moves under way."""
        with self._lock:  # a queue for those that come later, whom these Nones are not for
            workers, self._workers = self._workers, []
            jobs, self._jobs = self._jobs, SimpleQueue()
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join()

    def _start(self, helpers: int, job: _Job) -> None:
        with self._lock:
            while len(self._workers) < helpers:
                # A daemon: it must not keep the program from ending, and holds nothing that has to be given back.
                worker = threading.Thread(target=_work, args=(self._jobs,), name="pinstage-pack", daemon=True)
                worker.start()
                self._workers.append(worker)
            for _ in range(helpers):
                self._jobs.put(job)

    def __del__(self) -> None:
        for _ in getattr(self, "_workers", ()):
            self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.work()
        del job  # while waiting for the next one this one must be free to go


class _Job:
    """One slab to be filled: the shared pieces by whoever has time, the others by the calling thread.

    Args:
        moves: fill the slab.
        nbytes: of the raw part.
        large_by_torch: pieces of large leaves are not shared.
    """

    def __init__(self, moves: Moves, nbytes: int, *, large_by_torch: bool) -> None:
        self._moves = moves
        self._pieces = moves.pieces()
        self._chunks = cut_into_chunks(self._pieces, nbytes)
        self._chunk_of = [chunk for chunk in self._chunks for _ in range(chunk.pieces)]
        shared = [piece.whole > 0 or not large_by_torch for piece in self._pieces]
        self._shared = [index for index, is_shared in enumerate(shared) if is_shared]
        self._own = deque(index for index, is_shared in enumerate(shared) if not is_shared)
        self._turn = itertools.count()  # a step of it is atomic: each shared piece goes to one thread
        self._helpers: list[threading.Lock] = []  # each held while a thread helps
        self._errors: list[BaseException] = []
        self.shared_bytes = sum(
            piece.nbytes for piece, is_shared in zip(self._pieces, shared, strict=True) if is_shared
        )

    def work(self) -> None:
        """Take shared pieces and move them until none is left."""
        helping = threading.Lock()
        with helping:
            self._helpers.append(helping)  # before the first step, see end()
            while self._step():
                pass

    def work_and_wait(self) -> Iterator[int]:
        """Move what is not shared, help with the rest, yield the end of each chunk when it is complete."""
        for chunk in self._chunks:
            while self._own and self._chunk_of[self._own[0]] is chunk:
                self._move(self._own.popleft(), by_torch=True)
            while not chunk.is_done():
                if not self._step():
                    chunk.wait()
            if self._errors:
                raise self._errors[0]
            yield chunk.end

    def end(self) -> None:
        """See that no thread touches the slab any more: leave out what nobody has begun, wait for the rest."""
        if not all(chunk.is_done() for chunk in self._chunks):
            # Not by the chunks' counts: an interrupt of the calling thread may have come between taking a piece and
            # counting it. Who is not in the list by now finds no piece.
            while next(self._turn) < len(self._shared):
                pass
            for helping in self._helpers:
                helping.acquire()
        # The slab's view has to die here, or the slab would not be free: a thread may hold the job a moment longer.
        del self._moves

    def _step(self) -> bool:
        """Move the next shared piece; say whether there was one."""
        turn = next(self._turn)
        if turn >= len(self._shared):
            return False
        self._move(self._shared[turn], by_torch=False)
        return True

    def _move(self, index: int, *, by_torch: bool) -> None:
        try:
            if by_torch:
                self._moves.copy(self._pieces[index])
            else:
                self._moves.move(self._pieces[index])
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._errors.append(error)
        self._chunk_of[index].one_done()


class Chunk:
    """Consecutive pieces that travel together.

    Waiting is done on a plain lock: an interrupt may leave a `threading.Event` locked for ever.
    """

    def __init__(self, pieces: int, end: int) -> None:
        self.pieces = pieces
        self.end = end
        self._moved = itertools.count(1)
        self._moving = threading.Lock()
        self._moving.acquire()

    def one_done(self) -> None:
        if next(self._moved) == self.pieces:
            self._moving.release()

    def is_done(self) -> bool:
        return not self._moving.locked()

    def wait(self) -> None:
        with self._moving:
            pass


def cut_into_chunks(pieces: list[Piece], nbytes: int) -> list[Chunk]:
    """Cut pieces into even chunks of at least about `CHUNK_BYTES`, at most `MAX_CHUNKS`."""
    count = max(1, min(MAX_CHUNKS, nbytes // CHUNK_BYTES))
    chunks: list[Chunk] = []
    taken = 0
    for index, piece in enumerate(pieces, 1):
        end = piece.offset + piece.nbytes
        if end * count >= nbytes * (len(chunks) + 1) or index == len(pieces):
            chunks.append(Chunk(index - taken, end))
            taken = index
    return chunks
