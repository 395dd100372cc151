"""How a batch's bytes get into a slab quickly: ranges of the slab over threads, chunks of it in turns with the copy.

The slab is cut into byte ranges, which do not care where a leaf ends. A small batch is one range, moved by the calling
thread. A larger one is shared out, a contiguous range for each thread. A very large one is cut into chunks first, each
shared out like that, and the chunks become ready in order, so that the first can travel while the next is packed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ._layout import Moves, Table

BYTES_PER_THREAD = 4 * 1024 * 1024
"""A thread is given at least this much of each chunk: 64 leaves of 1 MiB took 3.5 ms with 4 threads and 5.5 ms with 12
on the reference machine, where starting a task costs 30 to 50 us."""

MAX_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took 8.7 ms with 12 and 8.8 ms with 16 on the reference machine."""

CHUNK_BYTES = 16 * 1024 * 1024
"""The smallest chunk: long enough that the copy call (8 us) and the hand-over between threads do not show."""

MAX_CHUNKS = 6
"""More chunks only cost hand-overs: with six, 1/6 of the packing is not hidden behind the copy."""


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

    Raises:
        ValueError: `threads` is less than 1.

    May be used by several threads at once.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1: {threads}; 1 packs in the calling thread")
        self.threads = min(usable_cpus(), MAX_THREADS) if threads is None else threads
        self._executor: ThreadPoolExecutor | None = None
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
        moves.gather()
        ends = chunk_ends(table.raw_end)
        threads = min(self.threads, table.raw_end // len(ends) // BYTES_PER_THREAD)
        if threads > 1:
            yield from self._pack_in_parallel(moves, ends, table.nbytes, threads)
        else:
            moves.everything()
            yield table.nbytes

    def _pack_in_parallel(self, moves: Moves, ends: list[int], nbytes: int, threads: int) -> Iterator[int]:
        moves.prepare()
        chunks = [_Chunk(threads) for _ in ends]
        errors: list[BaseException] = []
        stopped = False

        def move_share(thread: int, index: int) -> None:
            low, high = ends[index - 1] if index else 0, ends[index]
            share = -(-(high - low) // threads)
            start = low + thread * share
            try:
                if not stopped and not errors:
                    moves.range(start, min(start + share, high))
            except BaseException as error:  # noqa: BLE001 - raised again by the calling thread
                errors.append(error)
            chunks[index].one_done()

        def move_shares(thread: int) -> None:
            for index in range(len(ends)):
                move_share(thread, index)

        executor = self._threads()
        tasks = []
        try:
            for thread in range(1, threads):
                tasks.append(executor.submit(move_shares, thread))  # noqa: PERF401 - a submit may fail
            for index, end in enumerate(ends):
                move_share(0, index)
                chunks[index].wait()
                if errors:
                    raise errors[0]
                yield end if index < len(ends) - 1 else nbytes
        finally:
            stopped = True
            for task in tasks:
                task.result()  # waits

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="pinstage-pack")
            return self._executor

    def close(self) -> None:
        """End the threads; waits for moves under way."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


class _Chunk:
    """Counts the threads that still work on a chunk; wakes the one that waits when there is none."""

    def __init__(self, threads: int) -> None:
        self._working = threads
        self._lock = threading.Lock()
        self._done = threading.Event()

    def one_done(self) -> None:
        with self._lock:
            self._working -= 1
            if not self._working:
                self._done.set()

    def wait(self) -> None:
        self._done.wait()


def chunk_ends(nbytes: int) -> list[int]:
    """Cut `nbytes` into even chunks of at least `CHUNK_BYTES`, at most `MAX_CHUNKS`; return where each ends."""
    count = max(1, min(MAX_CHUNKS, nbytes // CHUNK_BYTES))
    return [nbytes * (index + 1) // count for index in range(count)]
