"""Copies into existing tensors (`out=`): their checks, before the first byte, and the copy.

::

    batch --stage--> device slab --Transfer.wait(): one copy on the device, on the consumer's stream--> out

So a batch crosses the bus while `out` is still in use, for example by a CUDA graph that reads the batch before it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from .._batch import (
    COPIED_AS_THEY_ARE,
    INTEGERS,
    PACKED,
    WRAPPERS,
    Parts,
    RowKind,
    Structure,
    Table,
    as_tensor,
    bytes_at,
    dense_stride,
    describe,
    plain_memory,
    walk,
)
from .._compat.calls import copy_each
from ..errors import LayoutError

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_LEAVES_PER_RUN = 4
"""Leaves that are neighbours are copied as one range of bytes if a range has this many on average. The two tensors of a
range cost as much as the views of some leaves."""

_MOST_PATHS = 8
"""The most paths that a note names."""

_MAY_BE_WRITTEN = "may be written in part"


class _Run(NamedTuple):
    """Bytes of the device slab whose destinations are one range of memory, too."""

    offset: int
    nbytes: int
    first: int
    """The leaf that they begin with."""


class Destinations:
    """The tensors of `out`, checked against a batch. Nothing is written before `fill`.

    Args:
        parts: the batch's parts, as `readable` returns them.
        out: a nest of the batch's structure.
        device: where the destinations have to be.
        elsewhere: the batch's tables for other devices, if it has leaves there.

    Attributes:
        structure: the batch's structure.
        leaves: the leaves of the result: the destinations of tensors, and the batch's other leaves.
        as_they_are: the leaves, by number, whose bytes in a slab are those of their destination.

    Raises:
        LayoutError: `out` has another structure or shape; or a destination isn't a tensor, is on another device, is
            expanded, requires grad, would need a cast that torch doesn't have, or is also that of another leaf.
    """

    def __init__(self, parts: Parts, out: Any, device: torch.device, elsewhere: Sequence[Table] = ()) -> None:
        self.structure, self._device = parts.structure, device
        self._tables = parts.table, *elsewhere
        existing = in_order(parts.structure, out)
        self.leaves = _results(parts, existing)
        memory = self._memory_of(existing)
        self.as_they_are: list[int] = np.flatnonzero(memory[:, 0] >= 0).tolist()
        self._by_torch: list[int] = []
        self._in_order: list[int] = []
        if len(self.as_they_are) < len(existing):
            self._by_torch = [index for index in tensors_of(parts.table) if memory[index, 0] < 0]
        spans = memory[:, :2].copy() if self._by_torch else memory[:, :2]
        self._shapes: dict[int, torch.Size] = {}
        for index in self._by_torch:
            _check(parts, index, existing[index], device)
            spans[index] = span_of(existing[index])
            self._shapes[index] = existing[index].shape
        self._memory = memory
        self._order(spans)

    def is_copied_by_torch(self, index: int) -> bool:
        """Return whether only ``Tensor.copy_`` can write a destination: it is sparse, of a subclass, or conjugated."""
        return index in self._shapes and not _is_plain(self.leaves[index])

    def check_again(self) -> None:
        """Check that no destination has changed its memory or shape since the call.

        Raises:
            LayoutError: one has.
        """
        differs = (self._memory_of(self.leaves) != self._memory).any(1)
        changed = np.flatnonzero(differs).tolist()
        changed += [index for index, shape in self._shapes.items() if self.leaves[index].shape != shape]
        if changed:
            path = self.structure.path(changed[0])
            raise LayoutError(f"out{path} has changed its shape or memory since the call; call stage() again", path)

    def fill(self, leaves: Callable[[], list[Any]], slab: torch.Tensor | None = None) -> None:
        """Copy a staged batch into the destinations, on the current stream.

        Args:
            leaves: makes the staged leaves.
            slab: uint8, the bytes of all packed leaves, on the device, if they are in one tensor.
        """
        runs = [] if slab is None else self._runs()
        try:
            if slab is not None and runs:
                self._copy_runs(runs, slab)
            if not runs or self._by_torch or self._in_order:
                self._copy(leaves(), [] if runs else self.as_they_are)
        except BaseException as error:
            note_written(error, self.paths())
            raise

    def leave_out(self, leaves: Iterable[int]) -> None:
        """Don't write some leaves, whose bytes the device writes itself."""
        others = set(leaves)
        self.as_they_are = [index for index in self.as_they_are if index not in others]

    def writes(self) -> list[int]:
        """Return the leaves to copy, in an order in which they can be copied one by one."""
        return sorted(self.as_they_are + self._by_torch) + self._in_order

    def paths(self) -> list[str]:
        """Return the paths of all leaves to copy."""
        paths = self.structure.paths()
        return [f"out{paths[index]}" for index in sorted(self.writes())]

    def _memory_of(self, tensors: list[Any]) -> Numbers:
        memory = plain_memory(self._tables[0], tensors, self._device)
        for table in self._tables[1:]:
            memory = np.maximum(memory, plain_memory(table, tensors, self._device))
        return memory

    def _order(self, spans: Numbers) -> None:
        """Find the destinations that share memory.

        - Of several for the same source, with the same memory, one is written.
        - Different sources for the same memory, or for dense destinations that overlap, are an error.
        - Others may interleave without sharing a byte, such as columns. They are copied one by one, in the batch's order,
          after all others.
        """
        crowded = _crowded(spans)
        opaque = [index for index in self._by_torch if spans[index, 0] < 0]
        if not crowded and len(opaque) < 2:
            return
        repeated = self._repeated(sorted(crowded + opaque))
        last = None
        for index in (index for index in crowded if index not in repeated and _is_dense(self.leaves[index])):
            if last is not None and spans[index, 0] < spans[last, 1]:
                self._check_sources(last, index, "overlaps")
            if last is None or spans[index, 1] > spans[last, 1]:
                last = index
        self._in_order = sorted(set(crowded) - repeated)
        others = repeated | set(crowded)
        self.as_they_are = [index for index in self.as_they_are if index not in others]
        self._by_torch = [index for index in self._by_torch if index not in others]

    def _repeated(self, leaves: list[int]) -> set[int]:
        """Return the leaves whose source and destination are those of an earlier leaf."""
        first_of: dict[Any, int] = {}
        repeated = set()
        for index in leaves:
            first = first_of.setdefault(_key_of(self.leaves[index]), index)
            if first != index:
                self._check_sources(first, index, "is the same memory as")
                if _lazy_flags(self.leaves[first]) == _lazy_flags(self.leaves[index]):
                    repeated.add(index)
        return repeated

    def _check_sources(self, one: int, other: int, relation: str) -> None:
        """Raise if two destinations that share memory have different sources."""
        rows = self._tables[0].rows
        sources = {int(rows["offset"][i]) if rows["kind"][i] == RowKind.ALIAS else i for i in (one, other)}
        if len(sources) > 1:
            first, second = self.structure.path(min(one, other)), self.structure.path(max(one, other))
            raise LayoutError(
                f"out{second} {relation} out{first}, and their sources differ; pass tensors that don't overlap", second
            )

    def _runs(self) -> list[_Run]:
        """Return the ranges that leaves form both in the slab and in memory; none if these are too many."""
        rows = self._tables[0].rows
        leaves = [index for index in self.as_they_are if rows["nbytes"][index]]
        offsets, (starts, ends) = rows["offset"][leaves], self._memory[leaves, :2].T
        order = np.argsort(offsets, kind="stable")
        offsets, starts, ends = offsets[order], starts[order], ends[order]
        is_behind = (starts[1:] == ends[:-1]) & (np.diff(offsets) == np.diff(starts))
        begins = np.flatnonzero(np.concatenate(([True], ~is_behind)))
        if len(begins) * _LEAVES_PER_RUN > len(leaves):
            return []
        sizes = ends[np.append(begins[1:], len(leaves)) - 1] - starts[begins]
        firsts = np.array(leaves)[order[begins]]
        runs = [
            _Run(*numbers) for numbers in zip(offsets[begins].tolist(), sizes.tolist(), firsts.tolist(), strict=True)
        ]
        return runs if all(_reaches(self.leaves[run.first], run.nbytes) for run in runs) else []

    def _copy_runs(self, runs: list[_Run], slab: torch.Tensor) -> None:
        written = [self.leaves[index] for index in self.as_they_are]
        with writing(written):
            ranges = [bytes_at(self.leaves[run.first], run.nbytes) for run in runs]
            copy_each(ranges, [slab[run.offset : run.offset + run.nbytes] for run in runs])
        torch.autograd.graph.increment_version(written)  # the ranges have versions of their own

    def _copy(self, leaves: list[Any], as_they_are: list[int]) -> None:
        """Copy leaves one by one only where torch can't copy several at once."""
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        codes = self._memory[as_they_are, 2]
        for code in np.unique(codes).tolist():
            groups[code] = [as_they_are[at] for at in np.flatnonzero(codes == code).tolist()]
        one_by_one = []
        for index in self._by_torch:
            place, leaf = self.leaves[index], leaves[index]
            if _is_plain(place) and _is_dense(place) and place.stride() == leaf.stride():
                groups[place.dtype, leaf.dtype].append(index)
            else:
                one_by_one.append(index)
        for group in groups.values():
            copy_all([self.leaves[index] for index in group], [leaves[index] for index in group])
        for index in one_by_one + self._in_order:
            place = self.leaves[index]
            if _is_plain(place):
                copy_all([place], [leaves[index]])
            else:
                with writing([place]):
                    place.copy_(leaves[index])


# -- checks ------------------------------------------------------------------------------------------------------------


def in_order(structure: Structure, out: Any) -> list[Any]:
    """Return the leaves of `out`, in the batch's order.

    Raises:
        LayoutError: `out` has another structure.
    """
    leaves, its_own = walk(out)
    if its_own == structure:
        return leaves
    paths, theirs = structure.paths(), its_own.paths()
    if not its_own.matches(structure) or sorted(paths) != sorted(theirs):
        missing = [path for path in paths if path not in theirs]
        unknown = [path for path in theirs if path not in paths]
        which = ""
        if missing:
            which = f"; batch{missing[0]} is not in out"
        elif unknown:
            which = f"; out{unknown[0]} is not in the batch"
        raise LayoutError(
            f"out's structure differs from the batch's: {its_own} instead of {structure}{which}; pass a nest of the "
            "same containers and keys, such as an earlier result of to_device",
            (missing + unknown + [""])[0],
        )
    by_path = dict(zip(theirs, leaves, strict=True))
    return [by_path[path] for path in paths]


def tensors_of(table: Table) -> list[int]:
    """Return the leaves that have a destination: tensors and arrays, and what moves by its own ``.to()``."""
    return table.positions(*PACKED, RowKind.MOVED, RowKind.ALIAS)


def _results(parts: Parts, existing: list[Any]) -> list[Any]:
    if not parts.table.others:
        return existing
    leaves = [unwrapped(leaf) for leaf in parts.leaves]
    for index in tensors_of(parts.table):
        leaves[index] = existing[index]
    return leaves


def unwrapped(leaf: Any) -> Any:
    return leaf.obj if type(leaf) in WRAPPERS else leaf


def _check(parts: Parts, index: int, place: Any, device: torch.device) -> None:
    """Raise if a leaf can't be copied to its destination."""
    why = _why_not(as_tensor(unwrapped(parts.leaves[index])), place, device)
    if why is not None:
        path = parts.structure.path(index)
        raise LayoutError(f"out{path} {why}", path)


def _why_not(source: Any, place: Any, device: torch.device) -> str | None:
    """Return why a leaf can't be copied to a destination, and what to do; None if it can."""
    if not isinstance(place, torch.Tensor):
        return f"is a {type(place).__name__}, but the batch has a tensor there; pass a tensor"
    if not isinstance(source, torch.Tensor):
        return (
            f"cannot take a {type(source).__name__}, which moves by its own .to(); register_node() its class, or leave "
            "it out of both"
        )
    if source.is_nested or place.is_nested:
        return "is, or would take, a nested tensor; pass its values and offsets"
    if place.shape != source.shape:
        return f"has shape {list(place.shape)}, but the batch has {list(source.shape)} there; pass that shape"
    if place.device != device:
        return f"is on {place.device}, but the call writes to {device}; pass a tensor on that device"
    if place.requires_grad and torch.is_grad_enabled():
        return "requires grad, and grad mode is on; call under torch.no_grad(), or pass its detach()"
    if place.layout is not source.layout:
        return f"has layout {place.layout}, but the batch has {source.layout} there; pass that layout"
    if _is_expanded(place):
        return f"is expanded: shape {list(place.shape)}, stride {list(place.stride())}; pass elements with own memory"
    if place.dtype is not source.dtype and not _can_cast(source.dtype, place.dtype, device):
        return f"has {place.dtype}, and torch can't cast the batch's {source.dtype} to it; pass a tensor of that dtype"
    return None


def _is_expanded(place: torch.Tensor) -> bool:
    steps = place.stride() if place.layout is torch.strided else ()
    return any(step == 0 and size > 1 for step, size in zip(steps, place.shape, strict=False))


@cache
def _can_cast(source: torch.dtype, destination: torch.dtype, device: torch.device) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex numbers that lose a part; the copy warns of it, too
        try:
            torch.empty(1, dtype=destination, device=device).copy_(torch.empty(1, dtype=source, device=device))
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
            return False
    return True


def _is_plain(place: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are its values: it isn't sparse, of a subclass, or lazily conjugated or negated."""
    is_known = type(place) in (torch.Tensor, torch.nn.Parameter) and place.layout is torch.strided
    return is_known and not (place.is_quantized or any(_lazy_flags(place)))


def _lazy_flags(place: torch.Tensor) -> tuple[bool, bool]:
    return place.is_conj(), place.is_neg()


def _reaches(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a tensor's storage has this many bytes from the tensor's first element on."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() + nbytes <= storage.data_ptr() + storage.nbytes()


def _is_dense(place: torch.Tensor) -> bool:
    return dense_stride(tuple(place.shape), place.stride())


def span_of(place: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the byte behind its last; -1 if only torch knows them."""
    if place.layout is not torch.strided or hasattr(place, "__tensor_flatten__"):
        return -1, -1
    try:
        start = place.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return -1, -1
    steps = zip(place.shape, place.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in steps) + 1 if place.numel() else 0
    return start, start + reach * place.itemsize


def overlap(tensors: list[Any], others: list[Any]) -> list[bool]:
    """Return, for each tensor, whether its range of memory overlaps that of one of the others."""
    ranges = np.array([span_of(other) for other in others]).reshape(-1, 2)
    starts, ends = ranges[np.argsort(ranges[:, 0])].T
    furthest = np.concatenate(([-1], np.maximum.accumulate(ends)))  # the end of those before a number
    spans = np.array([span_of(tensor) for tensor in tensors]).reshape(-1, 2)
    begun = np.searchsorted(starts, spans[:, 1])
    result: list[bool] = ((furthest[begun] > spans[:, 0]) & (spans[:, 1] > spans[:, 0])).tolist()
    return result


def _key_of(place: torch.Tensor) -> Any:
    """Return a key that is equal for tensors of the same elements in memory."""
    start, _ = span_of(place)
    return id(place) if start < 0 else (start, place.dtype, place.shape, place.stride())


def _crowded(spans: Numbers) -> list[int]:
    """Return the tensors whose range of memory overlaps that of another, by address."""
    leaves = np.flatnonzero(spans[:, 1] > spans[:, 0])
    leaves = leaves[np.argsort(spans[leaves, 0], kind="stable")]
    starts, ends = spans[leaves].T
    is_apart = starts[1:] >= np.maximum.accumulate(ends)[:-1]
    if is_apart.all():
        return []
    cluster = np.concatenate(([0], np.cumsum(is_apart)))
    crowded: list[int] = leaves[np.bincount(cluster)[cluster] > 1].tolist()
    return crowded


# -- reading -----------------------------------------------------------------------------------------------------------


def readable(parts: Parts, device: torch.device, *, arrays: bool = True) -> Parts:
    """Describe a batch again if it has tensors that require grad, which are read detached.

    Args:
        parts: the batch's parts.
        device: see `describe`.
        arrays: see `describe`.
    """
    moved = parts.table.positions(RowKind.MOVED) if parts.table.moved else []
    leaves = list(parts.leaves)
    for index in moved:
        leaf = leaves[index]
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or type(leaf) is torch.nn.Parameter):
            leaves[index] = leaf.detach()
    is_same = all(leaves[index] is parts.leaves[index] for index in moved)
    return parts if is_same else describe(leaves, parts.structure, device, arrays=arrays)


def with_own_copies(parts: Parts, device: torch.device) -> Parts:
    """Copy the tensors of a batch that are on the device already, on the current stream.

    Staged tensors are copied to their destinations later, when the batch may have changed.
    """
    if not parts.table.moved:
        return parts
    leaves = list(parts.leaves)
    for index in parts.table.positions(RowKind.MOVED):
        tensor = unwrapped(leaves[index])
        if isinstance(tensor, torch.Tensor) and tensor.device == device:
            leaves[index] = tensor.detach().clone()
    return parts._replace(leaves=leaves)


# -- writing -----------------------------------------------------------------------------------------------------------


def copy_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors of one dtype to others of one dtype and device, bit for bit if the dtypes are the same."""
    dtype = places[0].dtype
    if dtype is sources[0].dtype and dtype not in COPIED_AS_THEY_ARE:
        integer = INTEGERS[dtype.itemsize]
        places, sources = [place.view(integer) for place in places], [source.view(integer) for source in sources]
    with writing(places):
        copy_each(places, sources)


@contextmanager
def writing(places: list[torch.Tensor]) -> Iterator[None]:
    """Allow torch's own functions to write tensors, whatever mode they were made in."""
    are_inference = not torch.is_inference_mode_enabled() and any(map(torch.Tensor.is_inference, places))
    places = list(places)
    with torch.inference_mode() if are_inference else torch.no_grad():
        yield
    if are_inference:  # inference mode counts no changes of other tensors
        torch.autograd.graph.increment_version(places)


def note_written(error: BaseException, paths: Iterable[str]) -> None:
    """Note in the error of a call that failed which destinations it may have written, in place of an earlier note."""
    written = list(paths)
    if written:
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if not note.startswith(_MAY_BE_WRITTEN)]
        rest = ", ..." if len(written) > _MOST_PATHS else ""
        error.add_note(f"{_MAY_BE_WRITTEN}: {', '.join(written[:_MOST_PATHS])}{rest}")
