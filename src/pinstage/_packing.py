"""How a batch's bytes get into a slab quickly: by several threads, and in chunks that travel while the next is packed.

The slab's bytes are cut into pieces of about a megabyte, which threads take one after the other, the calling thread
among them. Consecutive pieces make a chunk; when all of it is moved, it can travel. Small batches are one chunk and a
single thread's work.

Why threads of our own and not torch's: those share out each copy evenly and wait for all of it, spinning. Where other
processes want the same cpus, as the workers of a DataLoader do, each such wait takes until the scheduler has served
them: 8 ms for each leaf on the reference machine with half of its cpus busy, 85 times as long (benchmarks/NOTES.md).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import SimpleQueue

import torch

from ._host import usable_cpus
from ._layout import Chunk, Moves, Table

MAX_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took 7.5 ms with 8, 10 and 12 on the reference machine."""

PARALLEL_FROM_BYTES = 4 * 1024 * 1024
"""Below this size a second thread gains nothing: waking it and passing the interpreter lock around take 0.1 ms."""


def threads_for(nbytes: int) -> int:
    """Return how many threads move so many bytes quickest; 1 for less than `PARALLEL_FROM_BYTES`.

    More have to pass the interpreter lock around more often: 64 leaves of 1 MiB took 1.9 ms with 5 or 6 and 2.7 with 8
    to 12, 300 took 9.3 ms with 5 and 7.5 with 8 to 12.
    """
    return min(1 + nbytes // PARALLEL_FROM_BYTES, 4 + nbytes // (32 * 1024 * 1024))


class Packer:
    """Moves batches into slabs with a number of threads, which are kept until `close`.

    Args:
        threads: how many move bytes at the most, the calling one included; None takes the usable cpus, at most
            `MAX_THREADS`.

    Raises:
        ValueError: `threads` is less than 1.

    May be used by several threads at once.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1: {threads}; 1 packs in the calling thread")
        self.threads = min(usable_cpus(), MAX_THREADS) if threads is None else threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def ends(self, table: Table) -> list[int]:
        """Return what `pack` will yield: where each chunk of a batch ends, in bytes; the last one ``table.nbytes``."""
        if self._threads_for(table) == 1:
            return [table.nbytes]
        return [*(chunk.end for chunk in table.fragments.chunks[:-1]), table.nbytes]

    def pack(self, table: Table, tensors: list[torch.Tensor], slab: torch.Tensor) -> Generator[int, None, None]:
        """Write tensors to their places in a slab, and report progress.

        Args:
            table: the offset table.
            tensors: on the CPU, as the table describes them; the caller keeps them alive and unchanged meanwhile.
            slab: uint8 ``[>= table.nbytes]`` on the CPU.

        Yields:
            Offsets, rising, those that `ends` returns: all bytes before it are in the slab. The iterator has to be
            exhausted or closed; closing waits for the threads.
        """
        moves = Moves(table, tensors, slab)
        threads = self._threads_for(table)
        if threads == 1:
            moves.everything()
            yield table.nbytes
            return
        job = _Job(moves, table.fragments.chunks)
        self._lend(threads - 1, job)
        try:
            for end, _ in zip(self.ends(table), job.work_and_wait(), strict=True):
                yield end
        finally:
            job.end()

    def _threads_for(self, table: Table) -> int:
        return min(self.threads, threads_for(table.nbytes))

    def close(self) -> None:
        """End the threads; waits for moves under way."""
        with self._lock:  # a queue for those that come later, whom these Nones are not for
            workers, self._workers = self._workers, []
            jobs, self._jobs = self._jobs, SimpleQueue()
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join()

    def _lend(self, helpers: int, job: _Job) -> None:
        """Let a job call so many threads."""
        with self._lock:
            while len(self._workers) < helpers:
                # A daemon: it must not keep the program from ending, and holds nothing that has to be given back.
                worker = threading.Thread(target=_work, args=(self._jobs,), name="pinstage-pack", daemon=True)
                worker.start()
                self._workers.append(worker)
            job.may_call(helpers, self._jobs)

    def __del__(self) -> None:
        for _ in getattr(self, "_workers", ()):
            self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.work()
        del job  # while waiting for the next one this one must be free to go


class _Job:
    """One slab to be filled by whoever has time.

    Args:
        moves: fill the slab.
        chunks: all of it.
    """

    def __init__(self, moves: Moves, chunks: list[Chunk]) -> None:
        self._moves = moves
        self._pieces = moves.pieces()
        self._chunks = [_Progress(chunk) for chunk in chunks]
        self._chunk_of = [chunk for chunk in self._chunks for _ in range(chunk.pieces)]
        self._turn = itertools.count()  # a step of it is atomic: each piece goes to one thread
        self._helpers: list[threading.Lock] = []  # each held while a thread helps
        self._errors: list[BaseException] = []
        self._calls: list[SimpleQueue[_Job | None]] = []

    def may_call(self, helpers: int, jobs: SimpleQueue[_Job | None]) -> None:
        """Let whoever works on it call so many others, who wait at a queue.

        Each thread calls one other before each piece that it moves, until all are called. A thread that wakes up has to
        take the interpreter lock; were all called at once, they would wait for it one after the other, for 0.1 ms each.
        """
        self._calls = [jobs] * helpers

    def work(self) -> None:
        """Take pieces and move them until none is left."""
        helping = threading.Lock()
        with helping:
            self._helpers.append(helping)  # before the first step, see end()
            while self._step():
                pass

    def work_and_wait(self) -> Iterator[_Progress]:
        """Take pieces as well, and yield each chunk when it is complete."""
        for chunk in self._chunks:
            while not chunk.is_done():
                if not self._step():
                    chunk.wait()
            if self._errors:
                raise self._errors[0]
            yield chunk

    def end(self) -> None:
        """See that no thread touches the slab any more: leave out what nobody has begun, wait for the rest."""
        if not all(chunk.is_done() for chunk in self._chunks):
            # Not by the chunks' counts: an interrupt of the calling thread may have come between taking a piece and
            # counting it. Who is not in the list by now finds no piece.
            while next(self._turn) < len(self._pieces):
                pass
            for helping in self._helpers:
                helping.acquire()
        # The slab's view has to die here, or the slab would not be free: a thread may hold the job a moment longer.
        del self._moves

    def _step(self) -> bool:
        """Move the next piece; say whether there was one."""
        turn = next(self._turn)
        if turn >= len(self._pieces):
            return False
        try:
            if self._calls:
                with suppress(IndexError):  # another thread took the last
                    self._calls.pop().put(self)
            self._moves.move(self._pieces[turn])
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._errors.append(error)
        self._chunk_of[turn].one_done()
        return True


class _Progress:
    """How far a chunk is.

    Waiting is done on a plain lock: an interrupt may leave a `threading.Event` locked for ever.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.pieces = chunk.pieces
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
