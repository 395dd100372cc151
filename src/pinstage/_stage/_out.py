"""Copies into existing tensors (`out=`): their checks, before the first byte, and the copy.

::

    batch --stage--> device slab --Transfer.wait(): one copy, on the consumer's stream--> out

So a batch crosses the bus while `out` is still in use, for example by a CUDA graph that reads the
batch before it.
"""

from __future__ import annotations

import struct
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from .._batch import (
    COPIED_AS_THEY_ARE,
    PACKED,
    Match,
    Parts,
    RowKind,
    Structure,
    Table,
    as_integers,
    as_tensor,
    bytes_at,
    dense_stride,
    describe,
    match,
    unwrapped,
    walk,
)
from .._compat.calls import copy_each
from ..errors import LayoutError

Span: TypeAlias = tuple[int, int]
"""The addresses of a tensor's first byte, and of the byte behind its last; -1 if only torch knows
them.
"""

_MOST_PATHS = 8
"""The most paths that a note names."""

_MAY_BE_WRITTEN = "may be written in part"


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
        LayoutError: `out` has another structure or shape; or a destination isn't a tensor, is on
            another device, is expanded, requires grad, would need a cast that torch doesn't have,
            or is also that of another leaf.
    """

    def __init__(
        self, parts: Parts, out: Any, device: torch.device, elsewhere: Sequence[Table] = ()
    ) -> None:
        self.structure, self._device = parts.structure, device
        self._tables = parts.table, *elsewhere
        existing = in_order(parts.structure, out)
        self.leaves = _results(parts, existing)
        self._matches = self._matched(existing)
        self._shapes: dict[int, torch.Size] = {}  # of destinations that aren't written as they are
        self._by_torch: list[int] = []
        self._in_order: list[int] = []
        self.as_they_are = list(range(len(existing)))
        if self._matches[0].is_complete and parts.table.packed == len(existing):
            return
        self.as_they_are, spans = tensors_of(parts.table), self._spans()
        self.as_they_are = [index for index in self.as_they_are if spans[index][0] >= 0]
        self._by_torch = sorted(set(tensors_of(parts.table)) - set(self.as_they_are))
        for index in self._by_torch:
            place = existing[index]
            _check(parts, index, place, device)
            spans[index] = span_of(place)
            self._shapes[index] = place.shape
        self._order(spans)

    def is_opaque(self, index: int) -> bool:
        """Return whether only ``Tensor.copy_`` can write a destination: it is sparse, of a
        subclass, or conjugated.
        """
        return index in self._shapes and not _is_plain(self.leaves[index])

    def leave_out(self, leaves: Iterable[int]) -> None:
        """Don't write some leaves, whose bytes the device writes itself."""
        others = set(leaves)
        self.as_they_are = [index for index in self.as_they_are if index not in others]

    def writes(self) -> list[int]:
        """Return the leaves to copy, in an order in which they can be copied one by one."""
        return sorted(self.as_they_are + self._by_torch) + self._in_order

    def check_again(self) -> None:
        """Check that no destination has changed its memory or shape since the call.

        Raises:
            LayoutError: one has.
        """
        before = self._spans()
        matches, self._matches = self._matches, self._matched(self.leaves)
        if self._matches == matches and all(
            self.leaves[i].shape == shape for i, shape in self._shapes.items()
        ):
            return
        now, self._matches = self._spans(), matches
        changed = [index for index, span in enumerate(before) if now[index] != span]
        changed += [
            index for index, shape in self._shapes.items() if self.leaves[index].shape != shape
        ]
        path = self.structure.path(changed[0])
        raise LayoutError(
            f"out{path} has changed its shape or memory since the call; call stage() again", path
        )

    def fill(self, leaves: Callable[[], list[Any]], slab: torch.Tensor | None = None) -> None:
        """Copy a staged batch into the destinations, on the current stream.

        Args:
            leaves: makes the staged leaves.
            slab: uint8, the bytes of all packed leaves, on the device, if they are in one tensor.
        """
        runs = [] if slab is None else self._matches[0].runs
        is_whole = bool(runs) and all(
            _reaches(self.leaves[first], nbytes) for _, nbytes, first in runs
        )
        try:
            if slab is not None and is_whole:
                self._copy_runs(runs, slab)
            if not is_whole or self._by_torch or self._in_order:
                self._copy(leaves(), [] if is_whole else self.as_they_are)
        except BaseException as error:
            paths = self.structure.paths()
            note_written(error, [f"out{paths[index]}" for index in sorted(self.writes())])
            raise

    def _matched(self, tensors: list[Any]) -> list[Match]:
        return [match(table, tensors, self._device) for table in self._tables]

    def _spans(self) -> list[Span]:
        """Return the memory of each destination that is written as it is."""
        tables = [struct.iter_unpack("=2q", matched.memory) for matched in self._matches]
        return [max(spans) for spans in zip(*tables, strict=True)]

    def _order(self, spans: list[Span]) -> None:
        """Find the destinations that share memory.

        - Of several for the same source, with the same memory, one is written.
        - Different sources for the same memory, or for dense destinations that overlap, are an
          error.
        - Others may interleave without sharing a byte, such as columns. They are copied one by one,
          in the batch's order, after all others.
        """
        crowded = overlapping(spans)
        opaque = [index for index in self._by_torch if spans[index][0] < 0]
        repeated = self._repeated(sorted(crowded + opaque))
        self._check_dense([index for index in crowded if index not in repeated], spans)
        self._in_order = sorted(set(crowded) - repeated)
        others = repeated.union(crowded)
        self.as_they_are = [index for index in self.as_they_are if index not in others]
        self._by_torch = [index for index in self._by_torch if index not in others]

    def _repeated(self, leaves: list[int]) -> set[int]:
        """Return the leaves whose source and destination are those of an earlier leaf."""
        first_of: dict[Any, int] = {}
        repeated = set()
        for index in leaves:
            first = first_of.setdefault(key_of(self.leaves[index]), index)
            if first != index:
                self._check_sources(first, index, "is the same memory as")
                if _lazy_flags(self.leaves[first]) == _lazy_flags(self.leaves[index]):
                    repeated.add(index)
        return repeated

    def _check_dense(self, crowded: list[int], spans: list[Span]) -> None:
        """Raise if two dense destinations, given by address, overlap and have different sources."""
        furthest = None
        for index in filter(lambda index: _is_dense(self.leaves[index]), crowded):
            if furthest is not None and spans[index][0] < spans[furthest][1]:
                self._check_sources(furthest, index, "overlaps")
            if furthest is None or spans[index][1] > spans[furthest][1]:
                furthest = index

    def _check_sources(self, one: int, other: int, relation: str) -> None:
        """Raise if two destinations that share memory have different sources."""
        rows = self._tables[0].rows
        sources = {
            int(rows["offset"][i]) if rows["kind"][i] == RowKind.ALIAS else i for i in (one, other)
        }
        if len(sources) > 1:
            first, second = (
                self.structure.path(min(one, other)),
                self.structure.path(max(one, other)),
            )
            raise LayoutError(
                f"out{second} {relation} out{first}, and their sources differ; pass tensors that "
                "don't overlap",
                second,
            )

    def _copy_runs(self, runs: list[tuple[int, int, int]], slab: torch.Tensor) -> None:
        ranges = [bytes_at(self.leaves[first], nbytes) for _, nbytes, first in runs]
        copy_each(ranges, [slab[offset : offset + nbytes] for offset, nbytes, _ in runs])
        # The ranges have versions of their own.
        torch.autograd.graph.increment_version([self.leaves[index] for index in self.as_they_are])

    def _copy(self, leaves: list[Any], as_they_are: list[int]) -> None:
        """Copy leaves one by one only where torch can't copy several at once."""
        if self._matches[0].dtype >= 0 and len(as_they_are) == len(leaves):
            copy_all(self.leaves, leaves)
            return
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for index in as_they_are:
            groups[self.leaves[index].dtype].append(index)
        one_by_one = []
        for index in self._by_torch:
            destination, leaf = self.leaves[index], leaves[index]
            if (
                _is_plain(destination)
                and _is_dense(destination)
                and destination.stride() == leaf.stride()
            ):
                groups[destination.dtype, leaf.dtype].append(index)
            else:
                one_by_one.append(index)
        for group in groups.values():
            copy_all([self.leaves[index] for index in group], [leaves[index] for index in group])
        for index in one_by_one + self._in_order:
            copy_one(self.leaves[index], leaves[index])


# -- checks ----------------------------------------------------------------------------------------


def in_order(structure: Structure, out: Any) -> list[Any]:
    """Return the leaves of `out`, in the batch's order.

    Raises:
        LayoutError: `out` has another structure.
    """
    leaves, its_own = walk(out)
    if its_own.matches(structure):  # leaves are in the order of sorted keys
        return leaves
    paths, theirs = structure.paths(), its_own.paths()
    missing = [path for path in paths if path not in theirs]
    unknown = [path for path in theirs if path not in paths]
    which = ""
    if missing:
        which = f"; batch{missing[0]} is not in out"
    elif unknown:
        which = f"; out{unknown[0]} is not in the batch"
    elif str(its_own) == str(structure):
        which = "; the keys of a container are in another order, or its context differs"
    raise LayoutError(
        f"out's structure differs from the batch's: {its_own} instead of {structure}{which}; "
        "pass a nest of the same containers and keys, such as an earlier result of to_device",
        (missing + unknown + [""])[0],
    )


def tensors_of(table: Table) -> list[int]:
    """Return the leaves that have a destination: tensors and arrays, and what moves by its own
    ``.to()``.
    """
    return table.positions(*PACKED, RowKind.MOVED, RowKind.ALIAS)


def _results(parts: Parts, existing: list[Any]) -> list[Any]:
    if not parts.table.others:
        return existing
    leaves = [unwrapped(leaf) for leaf in parts.leaves]
    for index in tensors_of(parts.table):
        leaves[index] = existing[index]
    return leaves


def _check(parts: Parts, index: int, destination: Any, device: torch.device) -> None:
    """Raise if a leaf can't be copied to its destination."""
    why = _why_not(as_tensor(unwrapped(parts.leaves[index])), destination, device)
    if why is not None:
        path = parts.structure.path(index)
        raise LayoutError(f"out{path} {why}", path)


def _why_not(source: Any, destination: Any, device: torch.device) -> str | None:
    """Return why a leaf can't be copied to a destination, and what to do; None if it can."""
    if not isinstance(destination, torch.Tensor):
        return f"is a {type(destination).__name__}, but the batch has a tensor there; pass a tensor"
    if not isinstance(source, torch.Tensor):
        return (
            f"cannot take a {type(source).__name__}, which moves by its own .to(); register_node() "
            "its class, or leave it out of both"
        )
    if source.is_nested or destination.is_nested:
        return "is, or would take, a nested tensor; pass its values and offsets"
    if destination.shape != source.shape:
        return (
            f"has shape {list(destination.shape)}, but the batch has {list(source.shape)} there; "
            "pass that shape"
        )
    if destination.device != device:
        return (
            f"is on {destination.device}, but the call writes to {device}; pass a tensor on that "
            "device"
        )
    if destination.requires_grad and torch.is_grad_enabled():
        return (
            "requires grad, and grad mode is on; call under torch.no_grad(), or pass its detach()"
        )
    if destination.layout is not source.layout:
        return (
            f"has layout {destination.layout}, but the batch has {source.layout} there; pass that "
            "layout"
        )
    if _is_expanded(destination):
        return (
            f"is expanded: shape {list(destination.shape)}, stride {list(destination.stride())}; "
            "pass elements with own memory"
        )
    if destination.dtype is not source.dtype and not _can_cast(
        source.dtype, destination.dtype, device
    ):
        return (
            f"has {destination.dtype}, and torch can't cast the batch's {source.dtype} to it; pass "
            "a tensor of that dtype"
        )
    return None


def _is_expanded(tensor: torch.Tensor) -> bool:
    steps = tensor.stride() if tensor.layout is torch.strided else ()
    return any(step == 0 and size > 1 for step, size in zip(steps, tensor.shape, strict=False))


@cache
def _can_cast(source: torch.dtype, destination: torch.dtype, device: torch.device) -> bool:
    with warnings.catch_warnings():
        # Of complex numbers that lose a part; the copy warns of it, too.
        warnings.simplefilter("ignore")
        try:
            torch.empty(1, dtype=destination, device=device).copy_(
                torch.empty(1, dtype=source, device=device)
            )
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
            return False
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are its values: it isn't sparse, a subclass, or lazily
    conjugated or negated.
    """
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_known and not (tensor.is_quantized or any(_lazy_flags(tensor)))


def _lazy_flags(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _reaches(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a tensor's storage has this many bytes from the tensor's first element on."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() + nbytes <= storage.data_ptr() + storage.nbytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    return dense_stride(tuple(tensor.shape), tensor.stride())


def span_of(tensor: torch.Tensor) -> Span:
    """Return the range of a tensor's memory."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return -1, -1
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return -1, -1
    if not start and tensor.numel():  # on meta, or in other tensors, as in a quantised weight
        return -1, -1
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in steps) + 1 if tensor.numel() else 0
    return start, start + reach * tensor.itemsize


def overlap(tensors: list[Any], others: list[Any]) -> list[bool]:
    """Return, for each tensor, whether its range of memory overlaps that of one of the others."""
    spans = sorted(map(span_of, others))
    starts = [start for start, _ in spans]
    furthest = [-1, *accumulate((end for _, end in spans), max)]  # the end of those before a number
    result = []
    for tensor in tensors:
        start, end = span_of(tensor)
        result.append(furthest[bisect_left(starts, end)] > start and end > start)
    return result


def key_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors of the same elements in memory."""
    start, _ = span_of(tensor)
    return id(tensor) if start < 0 else (start, tensor.dtype, tensor.shape, tensor.stride())


def overlapping(spans: list[Span]) -> list[int]:
    """Return the tensors whose range of memory overlaps that of another, by number, sorted by
    address.
    """
    crowded: list[int] = []
    cluster: list[int] = []
    furthest = 0
    for start, end, index in sorted(
        (*span, index) for index, span in enumerate(spans) if span[0] < span[1]
    ):
        if start >= furthest:
            crowded += cluster if len(cluster) > 1 else []
            cluster = []
        cluster.append(index)
        furthest = max(furthest, end)
    return crowded + (cluster if len(cluster) > 1 else [])


# -- reading ---------------------------------------------------------------------------------------


def readable(parts: Parts, device: torch.device, *, arrays: bool = True) -> Parts:
    """Describe a batch again if it has tensors that require grad, which are read detached.

    Args:
        parts: the batch's parts.
        device: see `describe`.
        arrays: see `describe`.
    """
    if not parts.table.moved:
        return parts
    moved, leaves = parts.table.positions(RowKind.MOVED), list(parts.leaves)
    for index in moved:
        leaf = leaves[index]
        if isinstance(leaf, torch.Tensor) and (
            leaf.requires_grad or type(leaf) is torch.nn.Parameter
        ):
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


# -- writing ---------------------------------------------------------------------------------------


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors of one dtype to others of one dtype and device, bit for bit if the dtypes are
    the same.
    """
    dtype = destinations[0].dtype
    if dtype is sources[0].dtype and dtype not in COPIED_AS_THEY_ARE:
        destinations, sources = [*map(as_integers, destinations)], [*map(as_integers, sources)]
    _write(copy_each, destinations, sources)


def copy_one(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy any tensor to another one of its shape and device, bit for bit if both are plain and of
    one dtype.
    """
    if _is_plain(destination):
        copy_all([destination], [source])
    else:
        _write(lambda places, sources: places[0].copy_(sources[0]), [destination], [source])


def _write(
    copy: Callable[..., Any], destinations: list[torch.Tensor], sources: list[torch.Tensor]
) -> None:
    """Let torch write tensors, whatever mode they were made in."""
    try:
        with torch.no_grad():
            copy(destinations, sources)
    # Asked afterwards, since asking a thousand tensors takes a tenth of a millisecond.
    except RuntimeError:
        if torch.is_inference_mode_enabled() or not any(
            map(torch.Tensor.is_inference, destinations)
        ):
            raise
        with torch.inference_mode():
            copy(destinations, sources)
        # On the CPU inference mode counts changes of other tensors, too; no GPU was asked. Counting
        # twice is harmless.
        torch.autograd.graph.increment_version(destinations)


def note_written(error: BaseException, paths: Iterable[str]) -> None:
    """Note in the error of a call that failed which destinations it may have written, in place of
    an earlier note.
    """
    written = list(paths)
    if written:
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if not note.startswith(_MAY_BE_WRITTEN)]
        rest = ", ..." if len(written) > _MOST_PATHS else ""
        error.add_note(f"{_MAY_BE_WRITTEN}: {', '.join(written[:_MOST_PATHS])}{rest}")
