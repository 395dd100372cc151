"""`HostRegion`, as users see it, and its handle for other processes."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any, Literal, NamedTuple, NoReturn, SupportsIndex

import numpy as np
import torch

from .._batch import Place, contiguous_stride
from .._compat.views import checked_sizes, tensor_over
from .._memory import PAGE_BYTES, HostRange
from .._pool import Claim, Fence, HostBudget, add_guard, check_timeout, close_files
from .._reaper import reaper, uninterrupted
from .._sizes import Size, format_bytes, parse_bytes
from ..errors import ClosedError, PinningError
from ._chunks import Chunks
from ._places import Nest, arrange, check_is_whole, ends_of_chunks, unit_of


class RegionPlan(NamedTuple):
    """The description of a region, the same in every process."""

    nbytes: int
    chunk_bytes: int
    row_bytes: int | None
    huge_page_bytes: int
    budget: HostBudget | None
    nest: Nest | None
    """Where tensors are; None if the region was made from a size."""


class HostRegion:
    """A large range of page-locked host memory, of an exact size, for caches, weights and optimizer
    states.

    The constructor maps all of it, page-locks the first chunk, and returns; threads touch and
    page-lock the rest in the background. Until `query` returns True, use the memory on the CPU
    only. A `Stager` waits for the bytes that it copies. Call `synchronize` before torch copies any
    itself.

    **Borders.** Each chunk is a registration of its own, and CUDA refuses a copy that touches two
    (``invalid argument``). So `tensor` refuses a view across the end of a chunk, unless `row_bytes`
    says where chunks may end. Then you may copy single rows of the view, and a stager copies any
    part, while torch's own copy of several rows can fail.

    **Lifetime.** Views keep the memory alive. It is freed when the region is closed or dropped, all
    views are gone, and the events of `guard` are done: a thread unregisters one chunk at a time,
    with pauses. Each chunk may wait for the device, and stop launches meanwhile, so close a region
    in idle moments. At the end of the process nothing is unregistered, and a process that is killed
    leaves nothing behind.

    **Fork.** Ordinary regions aren't inherited by forked children: touching a view ends the child.
    Views of a region with ``shared=True`` stay valid there, and `tensor` and `tree` work; `query`,
    `synchronize`, `guard` and `handle` raise `PinningError`. The memory is then kept, and counts in
    the budget, until the child has ended.

    Args:
        nbytes: an int, or text such as ``"48GiB"``; more than 0. Rounded up to whole pages.
        budget: the `HostBudget` that it counts against; None for none.
        shared: whether other processes can map the same bytes, by `handle`. Such memory has pages
            of 4 KiB, unless ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``advise`` or
            you ask for explicit huge pages.
        numa_node: the NUMA node that pages are taken from; "auto" for the device's, None for the
            kernel's choice.
        huge_pages: "auto" lets the kernel use huge pages where it can; if that is too slow, it is
            stopped, with a warning. "2MiB" or "1GiB" takes explicit huge pages, which root has to
            reserve (``vm.nr_hugepages``).
        chunk_bytes: size of a chunk. Smaller chunks stop neighbours for a shorter time, larger ones
            take less time in all.
        row_bytes: chunks end at multiples of this number of bytes; None lets them end anywhere.
        device: the device whose context page-locks; None for the current CUDA device, "cpu" for
            pageable memory. All devices can copy from it.
        progress: called from another thread as ``progress(ready_bytes, nbytes)``, after each chunk.

    Raises:
        MemoryError: the machine or the control group has less memory left, or too few huge pages
            are reserved.
        BudgetExceededError: the budget is smaller than the region.
        AcquireTimeoutError: the rest of the budget is in use.
        ValueError: a size is 0 or can't be read, `chunk_bytes` is less than a page, or another
            argument has an invalid value.
        TypeError: `budget` is not a `HostBudget`.

    Where CUDA refuses to register memory (confidential computing, some containers), a region that
    isn't shared takes its memory from ``cudaHostAlloc``; then the constructor blocks for all of it.
    Without CUDA, or if that is refused too, the region is pageable. `kind` and `reason` say which
    and why. If a later chunk is refused, all are unregistered, a `StagingWarning` says so, and
    `synchronize` raises.

    All methods may be called from any thread.
    """

    __slots__ = ("__weakref__", "_chunks", "_exporter", "_plan")

    def __init__(
        self,
        nbytes: Size,
        *,
        budget: HostBudget | None = None,
        shared: bool = False,
        numa_node: int | Literal["auto"] | None = "auto",
        huge_pages: Literal["auto", "2MiB", "1GiB"] = "auto",
        chunk_bytes: Size = "64MiB",
        row_bytes: Size | None = None,
        device: torch.device | str | int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        plan = _plan_of(nbytes, chunk_bytes, row_bytes, huge_pages, budget)
        page = plan.huge_page_bytes
        memory = HostRange(plan.nbytes, device, numa_node, shared=shared, huge_page_bytes=page)
        divide = partial(ends_of_chunks, _pieces(plan), memory.nbytes, plan.chunk_bytes)
        self._begin(plan, memory, divide, progress)

    @classmethod
    def empty_like(
        cls,
        tree: Any,
        *,
        budget: HostBudget | None = None,
        shared: bool = False,
        numa_node: int | Literal["auto"] | None = "auto",
        huge_pages: Literal["auto", "2MiB", "1GiB"] = "auto",
        chunk_bytes: Size = "64MiB",
        row_bytes: Size | None = None,
        device: torch.device | str | int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> HostRegion:
        """Make a region with a place for each tensor of a tree; `tree` returns the views.

        Chunks end where tensors end. A tensor of more than `chunk_bytes` is one chunk, unless its
        first dimension advances by a multiple of `row_bytes`: then chunks end at multiples of it
        from the tensor's beginning.

        Args:
            tree: containers as in a batch. Only shapes, dtypes and strides are read, so tensors may
                be on any device, meta included. Dense strides are kept; other tensors become
                contiguous.
            budget: see the class, as for all that follow.
            shared: see the class.
            numa_node: see the class.
            huge_pages: see the class.
            chunk_bytes: see the class.
            row_bytes: see above.
            device: see the class.
            progress: see the class.

        Raises:
            LayoutError: a tensor is sparse, quantised, nested or of a subclass.
            ValueError: the tree has no tensor with elements. Errors of the class are raised, too.
        """
        nest: Any = arrange(tree)
        if not nest.nbytes:
            raise ValueError(
                "the tree has no tensor with elements; pass a size to make a region without a tree"
            )
        return cls(
            nest, budget=budget, shared=shared, numa_node=numa_node, huge_pages=huge_pages,
            chunk_bytes=chunk_bytes, row_bytes=row_bytes, device=device, progress=progress,
        )  # fmt: skip

    @classmethod
    def from_handle(
        cls, handle: RegionHandle, *, device: torch.device | str | int | None = None
    ) -> HostRegion:
        """Map the region of another process, with the same chunks, and page-lock it in this one.

        Blocks until the first chunk is page-locked. The memory is counted once in the region's
        budget, and lives until all processes have closed it or ended.

        Args:
            handle: from the region's `handle` in that process.
            device: the device whose context page-locks; see the class.

        Raises:
            OSError: this process can't open or map more files.
        """
        region = cls.__new__(cls)
        plan, page, fd = handle._plan, handle._plan.huge_page_bytes, handle._descriptors[-1]
        memory = HostRange(plan.nbytes, device, None, shared=True, huge_page_bytes=page, fd=fd)
        region._begin(plan, memory, partial(tuple, handle._ends), keeps=handle)
        return region

    def _begin(
        self,
        plan: RegionPlan,
        memory: HostRange,
        divide: Callable[[], tuple[int, ...]],
        progress: Callable[[int, int], object] | None = None,
        keeps: object = None,
    ) -> None:
        """Take the memory, begin to page-lock it, and arrange that it is freed; `keeps` stays alive
        meanwhile.
        """
        self._plan = plan
        self._exporter: Any = None
        claim = None
        if plan.budget is not None:
            claim = Claim(plan.budget, memory.nbytes, is_shared=memory.is_shared)
        self._chunks = Chunks(memory, divide, progress, claim)
        # The memory is freed when this object is gone. Not the exporter: see `Lease._export`.
        life = np.empty(0)
        reaper.watch(life, self._chunks.reap)
        try:
            uninterrupted(self._chunks.begin, keeps=(life, keeps))
            slots = {"__slots__": ("chunks", "life")}
            bytes_type: Any = type("RegionBytes", (ctypes.c_ubyte * plan.nbytes,), slots)
            exporter = bytes_type.from_address(memory.address)
            exporter.chunks, exporter.life = self._chunks, life
        except BaseException:
            del life  # an error that is kept keeps this frame
            raise
        self._exporter = exporter

    @property
    def nbytes(self) -> int:
        """Bytes asked for, or up to the end of the tree's last tensor, without rounding up to whole
        pages.
        """
        return self._plan.nbytes

    @property
    def kind(self) -> Literal["registered", "allocated", "pageable"]:
        """How the memory is page-locked: by ``cudaHostRegister``, by ``cudaHostAlloc``, or not at
        all.
        """
        return self._chunks.kind  # type: ignore[return-value]

    @property
    def reason(self) -> str:
        """Why it isn't registered; empty if it is."""
        return self._chunks.reason

    def tensor(
        self,
        shape: tuple[int, ...] | int | None = None,
        dtype: torch.dtype = torch.uint8,
        *,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return a part of the region as a contiguous tensor, which keeps the memory alive. It
        holds zeros at first.

        Args:
            shape: the tensor's; None for all elements from `offset` on, in one dimension.
            dtype: torch's.
            offset: the first byte, a multiple of the dtype's size.

        Raises:
            ValueError: it doesn't fit the region, or it crosses the end of a chunk (see the class).
            TypeError: `dtype` isn't torch's, or it is quantised.
            ClosedError: the region is closed.
            PinningError: this is a forked child without the memory.
        """
        self._check(inherits=True)
        sizes = checked_sizes(shape, dtype, offset, self._plan.nbytes)
        nbytes = math.prod(sizes) * dtype.itemsize
        place = Place(offset, nbytes, dtype, sizes, contiguous_stride(sizes))
        inside = self._chunks.inside(offset, offset + nbytes)
        check_is_whole(place, inside, self._plan.row_bytes, self._plan.chunk_bytes)
        return self._view(place)

    def tree(self) -> Any:
        """Return the tree that `empty_like` was given, with views of the region in the places of
        its tensors.

        Other leaves are the same objects as in that tree. Views keep the memory alive.

        Raises:
            ValueError: the region was made without a tree.
            ClosedError, PinningError: as `tensor`.
        """
        if self._plan.nest is None:
            raise ValueError(
                "the region has no tree: it was made from a size; use "
                "HostRegion.empty_like(tree), or tensor()"
            )
        structure, leaves, _ = self._plan.nest
        # Tied tensors share one.
        views = {id(place): self._view(place) for place in leaves if isinstance(place, Place)}
        return structure.rebuild([views.get(id(leaf), leaf) for leaf in leaves])

    def _view(self, place: Place) -> torch.Tensor:
        return tensor_over(
            self._check(inherits=True), place.dtype, place.shape, place.stride, place.offset
        )

    def query(self) -> bool:
        """Return whether `synchronize` returns, or raises, at once: all of the region is ready.
        Doesn't block.
        """
        self._check()
        return self._chunks.is_ready(self._plan.nbytes)

    def synchronize(self, nbytes: Size | None = None, *, timeout: float | None = None) -> None:
        """Wait until the region is ready, page-locked if its kind is.

        Args:
            nbytes: the number of bytes from its beginning to wait for; None for all.
            timeout: seconds; None waits as long as it takes.

        Raises:
            PinningError: a later chunk was refused, so the region is pageable.
            ClosedError: the region is closed.
            TimeoutError: it isn't ready in time.
            ValueError: the region has fewer bytes, or `timeout` is negative or NaN.
        """
        self._check()
        if timeout is not None:
            check_timeout(timeout)
        size = self._plan.nbytes if nbytes is None else parse_bytes(nbytes)
        if size > self._plan.nbytes:
            raise ValueError(
                f"the region has {self._plan.nbytes} bytes, fewer than the {size} to wait for; "
                "pass at most its nbytes"
            )
        self._chunks.wait(size, timeout)

    def guard(self, event: Fence) -> None:
        """Keep the memory until an event is done, even if the region and all views are dropped.
        Doesn't block.

        Use it for copies that torch makes without waiting (``non_blocking=True``), and for your own
        kernels. A stager's copies don't need it. Events that are done are dropped when another is
        added.

        Args:
            event: recorded behind the work; a stream works, too.

        Raises:
            TypeError: `event` has no ``query()`` or no ``synchronize()``.
            ClosedError: the region is closed.
            PinningError: this is a forked child.
        """
        self._check()
        add_guard(self._chunks.guards, event)

    def handle(self) -> RegionHandle:
        """Return a handle, with which another process can map the region by `from_handle`.

        Raises:
            ValueError: the region wasn't made with ``shared=True``.
            ClosedError: the region is closed.
            PinningError: this is a forked child.
        """
        exporter = self._check()
        chunks = self._chunks
        memory = chunks.memory
        if not memory.is_shared or memory.fd is None:
            raise ValueError(
                "the region isn't shared: only a region made with shared=True has a handle"
            )
        handle = RegionHandle(self._plan, chunks.ends)
        rows = [] if chunks.claim is None else chunks.claim.descriptors
        uninterrupted(partial(handle._receive, os.dup, [*rows, memory.fd]), keeps=exporter)
        return handle

    def close(self) -> None:
        """Refuse new views, and free the memory when the last view is gone. May be called again.

        Doesn't block: a thread unregisters the chunks. Each chunk may wait for the device,
        so call this in idle moments.
        """
        self._exporter = None

    def _check(self, *, inherits: bool = False) -> Any:
        if self._exporter is None:
            raise ClosedError("the region is closed; make another one")
        if os.getpid() != self._chunks.pid and not (inherits and self._chunks.memory.is_shared):
            raise PinningError(
                "the region belongs to the parent of this forked process; make it with "
                "shared=True and use its views, or pass its handle() to a process that is spawned"
            )
        return self._exporter

    def __enter__(self) -> HostRegion:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a region can't be copied or pickled: {self!r}; pass its handle() to other processes"
        )

    def __repr__(self) -> str:
        ready = format_bytes(min(self._chunks.ready, self._plan.nbytes))
        state = "closed" if self._exporter is None else f"{ready} ready"
        return f"<HostRegion {format_bytes(self._plan.nbytes)} {self.kind}, {state}>"


class RegionHandle:
    """Lets `HostRegion.from_handle` map a region in another process. A handle keeps the memory
    alive.

    The memory counts in the region's budget as long as a handle keeps it, also while the handle is
    on its way.

    Picklable by ``multiprocessing`` and ``torch.multiprocessing``, as an argument of a process or
    through a queue or pipe: the descriptor of the memory is inherited, or sent over a socket of the
    process that pickles it. Pickle it separately for each process: a pickle can be unpickled only
    once, and raises `PinningError` after that.
    """

    __slots__ = ("_descriptors", "_ends", "_life", "_plan")

    def __init__(self, plan: RegionPlan, ends: tuple[int, ...]) -> None:
        self._plan, self._ends = plan, ends
        # The descriptor of the memory's row, if there is a budget, and that of the memory.
        self._descriptors: list[int] = []
        self._life = np.empty(0)  # not the handle: see `Reaper.watch`
        reaper.watch(self._life, partial(close_files, self._descriptors), in_children=True)

    def _receive(self, get: Callable[[Any], int], sources: list[Any]) -> None:
        """Get the descriptors. Call it in a thread that no interrupt reaches."""
        for source in sources:
            self._descriptors.append(get(source))
            os.set_inheritable(self._descriptors[-1], False)  # else `exec` would keep the memory

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._plan, self._ends, [DupFd(fd) for fd in self._descriptors])


def _received(plan: RegionPlan, ends: tuple[int, ...], sent: list[Any]) -> RegionHandle:
    handle = RegionHandle(plan, ends)
    try:
        uninterrupted(partial(handle._receive, methodcaller("detach"), sent), keeps=handle)
    except (AuthenticationError, EOFError, OSError) as error:
        raise PinningError(
            f"the handle of a region can't be unpickled: {error!r}; unpickle each pickle once, in "
            "a process of the same program, while the process that pickled it lives"
        ) from error
    return handle


def _plan_of(
    given: Any,
    chunk_bytes: Size,
    row_bytes: Size | None,
    huge_pages: str,
    budget: HostBudget | None,
) -> RegionPlan:
    """Check the arguments of a region; `given` is a size, or the `Nest` of
    `HostRegion.empty_like`.
    """
    if huge_pages not in ("auto", "2MiB", "1GiB"):
        raise ValueError(f"huge_pages must be 'auto', '2MiB' or '1GiB': {huge_pages!r}")
    nest = given if isinstance(given, Nest) else None
    nbytes = _positive("nbytes", given if nest is None else nest.nbytes)
    row = None if row_bytes is None else _positive("row_bytes", row_bytes)
    page = 0 if huge_pages == "auto" else parse_bytes(huge_pages)
    chunk = parse_bytes(chunk_bytes)
    if chunk < PAGE_BYTES:
        raise ValueError(
            f"chunk_bytes is less than a page: {chunk_bytes!r}. Pass {PAGE_BYTES:,} or more; each "
            "chunk is a registration of its own"
        )
    return RegionPlan(nbytes, chunk, row, page, budget, nest)


def _pieces(plan: RegionPlan) -> list[tuple[int, int, int]]:
    """Return what chunks should not cut, as `ends_of_chunks` takes it."""
    if plan.nest is None:
        return [(0, plan.nbytes, plan.row_bytes or 1)]
    return [
        (place.offset, place.nbytes, unit_of(place, plan.row_bytes))
        for place in plan.nest.leaves
        if isinstance(place, Place) and place.nbytes
    ]


def _positive(name: str, size: Size) -> int:
    nbytes = parse_bytes(size)
    if nbytes == 0:
        raise ValueError(f"{name} must be more than 0 bytes: {size!r}")
    return nbytes
