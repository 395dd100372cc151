"""Copies into existing tensors (`out=`): the checks before the first byte, and how each leaf is copied.

::

    batch, out --checks--> a destination for each tensor of the batch
      the same bytes there, large or neighbours   --packed, and copied straight to their places-->
      small, strided or cast                      --packed, one copy--> scratch --one _foreach_copy_-->
      tensors that cannot be packed               --dst.copy_(src)-->
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import (
    ALIGNMENT,
    COPIED_AS_THEY_ARE,
    DTYPES,
    INTEGERS,
    PACKED,
    WRAPPERS,
    Blocks,
    Parts,
    RowKind,
    Structure,
    describe,
    fit_as_they_are,
    from_array,
    into_tensors,
    take_apart,
    walk,
)
from .._compat.calls import copy_each
from ..errors import LayoutError

DIRECT_FROM_BYTES = 64 * 1024
"""Neighbours in the slab that have this size together are copied straight to their destinations."""

_FEW_COPIES = 8
"""Up to this many smaller copies go straight to their destinations, too: scratch costs an allocation and a kernel."""

LEAST_OF_CAP_BYTES = 4096
"""A cap below this size is too small for any part of a batch."""

SCRATCH_BYTES = 64 << 20
"""The most device memory that one call takes in addition to its destinations."""

NOTHING = take_apart([]).table
"""The offset table of an empty batch, since `out=` makes no tensors."""

_MOST_PATHS = 8
"""The most paths that a note names."""

_MAY_BE_WRITTEN = "may be written in part"
_CPU = torch.device("cpu")
_DTYPE_OF = operator.attrgetter("dtype")
_ITEMSIZES = np.array([0 if dtype is None else dtype.itemsize for dtype in DTYPES])


class Way(NamedTuple):
    """Leaves that are copied in the same way."""

    parts: Parts
    places: list[Any]
    """The destination of each leaf, by its row."""


class Direct(NamedTuple):
    """Leaves that are copied from the slab straight to their places."""

    parts: Parts
    blocks: Blocks
    leaves: list[int]
    """The indexes of the leaves in the batch."""


class OutPlan(NamedTuple):
    """How a batch is written into existing tensors. Everything is checked. Lists of int have indexes of leaves."""

    parts: Parts
    leaves: list[Any]
    """The result: the destinations, and the batch's other leaves."""
    plain: list[tuple[int, torch.Tensor, torch.Tensor]]
    """Index, destination and source of each leaf that is copied by ``dst.copy_(src)``."""
    scratch: list[int]
    """Leaves that are copied through scratch, where they are cast or strided."""
    direct: list[int]
    """Leaves whose bytes at the destination are those in the slab. They are copied straight there, unless that would
    take many small copies."""

    def ways(self) -> tuple[list[int], Direct | None]:
        """Return the leaves that are copied through scratch, and those that are copied straight to their places."""
        found = self._direct(self.direct)
        small = [] if found is None else found.blocks.small_copies(DIRECT_FROM_BYTES, _FEW_COPIES)
        if not small:
            return self.scratch, found
        if len(self.direct) < self.parts.table.packed:
            small = [self.direct[row] for row in small]
        return sorted(self.scratch + small), self._direct(sorted(set(self.direct) - set(small)))

    def _direct(self, chosen: list[int]) -> Direct | None:
        if not chosen:
            return None
        parts, places = self._way(chosen)
        return Direct(parts, into_tensors(parts.table, places, self.leaves[chosen[0]].is_cuda), chosen)

    def _way(self, chosen: list[int]) -> Way:
        """Take some of the leaves apart, unless they are all of the packed ones."""
        if len(chosen) == self.parts.table.packed:
            return Way(self.parts, self.leaves)
        return Way(take_apart([self.parts.leaves[i] for i in chosen]), [self.leaves[i] for i in chosen])

    def through_scratch(self, chosen: list[int]) -> Iterator[Way]:
        """Yield groups of leaves that fit into scratch together."""
        if self.parts.table.nbytes <= SCRATCH_BYTES:
            if chosen:
                yield self._way(chosen)
            return
        for sources, places in in_groups(self.pairs(chosen), SCRATCH_BYTES):
            yield Way(take_apart(sources), places)

    def pairs(self, chosen: list[int]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield leaves, each with its destination."""
        return ((self.parts.leaves[index], self.leaves[index]) for index in chosen)


def in_groups(pairs: Iterable[tuple[Any, torch.Tensor]], most: int) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Yield leaves and their destinations, in order, in groups that have at most `most` bytes in a slab.

    A larger leaf is cut where its destination's memory can be cut into ranges, and its destination in the same way.
    """
    sources: list[Any] = []
    there: list[torch.Tensor] = []
    nbytes = 0
    for leaf, whole in pairs:
        for source, place in _pieces(leaf, whole, most):
            room = -(-source.nbytes // ALIGNMENT) * ALIGNMENT
            if sources and nbytes + room > most:
                yield sources, there
                sources, there, nbytes = [], [], 0
            sources.append(source)
            there.append(place)
            nbytes += room
    if sources:
        yield sources, there


def _pieces(source: Any, place: torch.Tensor, most: int) -> Iterator[tuple[Any, torch.Tensor]]:
    if source.nbytes <= most:
        yield source, place
        return
    tensor = source if isinstance(source, torch.Tensor) else from_array(source)
    assert tensor is not None
    dim = max((dim for dim, size in enumerate(tensor.shape) if size > 1), key=place.stride)
    size = tensor.shape[dim]
    rows = max(1, size * most // tensor.nbytes)
    for start in range(0, size, rows):
        count = min(rows, size - start)
        yield from _pieces(tensor.narrow(dim, start, count), place.narrow(dim, start, count), most)


# -- writing -----------------------------------------------------------------------------------------------------------


def copy_through(way: Way, scratch: Blocks) -> None:
    """Copy leaves from scratch to their places, in order, on the current stream."""
    table = way.parts.table
    found, rows = scratch.leaves([None] * (table.others + table.moved)), table.positions(*PACKED)
    copy_all([way.places[row] for row in rows], [found[row] for row in rows])


def copy_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to other tensors of the same device, in order, bit for bit where the dtypes are the same."""
    with writing(places):
        if not COPIED_AS_THEY_ARE.issuperset(map(_DTYPE_OF, places)):
            for at, (place, source) in enumerate(zip(places, sources, strict=True)):
                if (dtype := place.dtype) not in COPIED_AS_THEY_ARE and dtype is source.dtype:
                    integer = INTEGERS[place.itemsize]
                    places[at], sources[at] = place.view(integer), source.view(integer)
        copy_each(places, sources)


def note_written(error: BaseException, structure: Structure, leaves: Iterable[int]) -> None:
    """Note in the error of a call that failed which tensors of ``out`` it may have written."""
    paths, written = structure.paths(), sorted(leaves)
    if written:
        if hasattr(error, "__notes__"):  # of a part of this call, whose paths are others
            error.__notes__ = [note for note in error.__notes__ if not note.startswith(_MAY_BE_WRITTEN)]
        shown = ", ".join(f"out{paths[index]}" for index in written[:_MOST_PATHS])
        error.add_note(f"{_MAY_BE_WRITTEN}: {shown}{', ...' if len(written) > _MOST_PATHS else ''}")


@contextmanager
def writing(places: list[torch.Tensor]) -> Iterator[None]:
    """Allow torch's own functions to write tensors, whatever mode they were made in."""
    are_inference = not torch.is_inference_mode_enabled() and any(map(torch.Tensor.is_inference, places))
    places = list(places)
    with torch.inference_mode() if are_inference else torch.no_grad():
        yield
    if are_inference:  # inference mode counts no changes of other tensors
        torch.autograd.graph.increment_version(places)


# -- checks ------------------------------------------------------------------------------------------------------------


def plan_for(parts: Parts, out: Any, device: torch.device) -> OutPlan:
    """Check existing tensors against a batch, and decide how each leaf is copied. Writes nothing.

    Args:
        parts: the batch's parts.
        out: a nest of the batch's structure.
        device: where the destinations have to be.

    Raises:
        LayoutError: another structure or shape; a destination that isn't a tensor, is on another device, is expanded or
            requires grad; or two destinations that overlap.
        IsContainer: a leaf's class has become a container: take the batch apart again.
    """
    places = in_order(parts.structure, out)
    return check([make_readable(parts, places)], places, device)


def check(by_device: list[Parts], places: list[Any], device: torch.device) -> OutPlan:
    """Check the destination of each tensor of a batch.

    Args:
        by_device: the batch, described first for one device, and then for each other device that has its tensors.
        places: the destinations, by leaf.
        device: where the destinations have to be.

    Raises:
        LayoutError, IsContainer: as `plan_for`.
    """
    parts = by_device[0]
    table, leaves = parts.table, results(parts, places)
    if table.packed + table.others == len(places) and fit_as_they_are(table, places, device):
        return OutPlan(parts, leaves, [], [], table.positions(*PACKED) if table.others else list(range(len(places))))
    there = _described(parts, places, device)
    rows, (_, steps) = there.table.rows, _memory(there)
    is_dense = rows["kind"] == RowKind.RAW
    is_expanded = ((steps == 0) & (rows["shape"] > 1)).any(1)
    is_plain = is_dense | ((rows["kind"] == RowKind.STRIDED) & ~is_expanded)
    fits, same = np.zeros((2, len(places)), dtype=np.bool)
    for other in by_device:
        mine = other.table.rows
        width = min(mine["shape"].shape[1], rows["shape"].shape[1])
        shape, is_packed = mine["shape"][:, :width], (mine["kind"] >= RowKind.RAW) & (mine["kind"] <= RowKind.STRIDED)
        alike = is_packed & (mine["ndim"] == rows["ndim"]) & (shape == rows["shape"][:, :width]).all(1)
        strides = (mine["stride"][:, :width] == rows["stride"][:, :width]) | (shape < 2)
        fits |= alike & is_plain
        same |= alike & is_dense & (mine["dtype"] == rows["dtype"]) & strides.all(1)
    rest = [index for index in table.positions(*PACKED, RowKind.MOVED) if not fits[index]]
    plain = [_by_itself(parts, places, there, device, index) for index in rest]
    same[_overlapping(parts.structure, places, there, fits)] = False
    direct, scratch = (mask.nonzero()[0].tolist() for mask in (same, fits & ~same))
    return OutPlan(parts, leaves, plain, scratch, direct)


def results(parts: Parts, places: list[Any]) -> list[Any]:
    """Return the leaves of the result: the destinations of tensors, and the batch's other leaves."""
    if not parts.table.others:
        return places
    leaves = [leaf.obj if type(leaf) in WRAPPERS else leaf for leaf in parts.leaves]
    for index in parts.table.positions(*PACKED, RowKind.MOVED, RowKind.ALIAS):
        leaves[index] = places[index]
    return leaves


def in_order(structure: Structure, out: Any) -> list[Any]:
    """Return the leaves of `out`, in the batch's order."""
    leaves, found = walk(out)
    if found == structure:
        return list(leaves)
    paths, theirs = structure.paths(), found.paths()
    if not found.matches(structure) or sorted(paths) != sorted(theirs):
        one = [path for path in paths if path not in theirs]
        other = [path for path in theirs if path not in paths]
        path = (one or other or [""])[0]
        which = f"; batch{path} is not in out" if one else f"; out{path} is not in the batch" if other else ""
        raise LayoutError(
            f"out's structure differs from the batch's: {found} instead of {structure}{which}; pass a nest of the same "
            "containers and keys, such as an earlier result of to_device",
            path,
        )
    by_path = dict(zip(theirs, leaves, strict=True))
    return [by_path[path] for path in paths]


def make_readable(parts: Parts, places: list[Any], device: torch.device = _CPU, *, arrays: bool = True) -> Parts:
    """Describe the leaves of a batch again, if `out` makes more of them packable.

    These are tensors that require grad, which are read detached, and repeated tensors that have several destinations.

    Args:
        parts: the batch's parts.
        places: the destinations, by leaf.
        device: see `describe`.
        arrays: see `describe`.
    """
    table = parts.table
    if table.packed + table.others == len(parts.leaves):
        return parts
    leaves = list(parts.leaves)
    for index in table.positions(RowKind.MOVED):
        leaves[index] = _plain(leaves[index])
    first_of = table.rows["offset"]
    for index in table.positions(RowKind.ALIAS):
        first = int(first_of[index])
        if not _is_same_view(places[index], places[first]):
            leaf = leaves[first]
            leaves[index] = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf.view()
    is_same = all(map(operator.is_, leaves, parts.leaves))
    return parts if is_same else describe(leaves, parts.structure, device, arrays=arrays)


def _plain(leaf: Any) -> Any:
    """Return a leaf; detached, if it is a parameter or another tensor that requires grad."""
    is_in_graph = type(leaf) is torch.nn.Parameter or (type(leaf) is torch.Tensor and leaf.requires_grad)
    return leaf.detach() if is_in_graph else leaf


def _is_same_view(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.layout is other.layout is torch.strided
        and (one.data_ptr(), one.dtype, one.shape, one.stride())
        == (other.data_ptr(), other.dtype, other.shape, other.stride())
    )


def _described(parts: Parts, places: list[Any], device: torch.device) -> Parts:
    """Describe the destinations. Each is written once.

    Parameters are described by their memory. Lazily conjugated or negated tensors are left out: only ``copy_`` can
    write them.
    """
    leaves: list[Any] = list(places)
    for index in parts.table.positions(RowKind.OTHER, RowKind.ALIAS):
        leaves[index] = None
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.is_conj() or leaf.is_neg():  # lazily: its bytes aren't its values
            leaves[index] = None
        elif not (leaf.requires_grad and torch.is_grad_enabled()):
            leaves[index] = _plain(leaf)
    return describe(leaves, parts.structure, device, arrays=False)


def _memory(there: Parts) -> tuple[Any, Any]:
    """Return the address of each destination, and its strides, which only strided ones have."""
    width = there.table.rows["shape"].shape[1]
    found = np.frombuffer(there.sources, dtype=np.int64).reshape(-1, 1 + width)
    return found[:, 0], found[:, 1:]


def _by_itself(
    parts: Parts, places: list[Any], there: Parts, device: torch.device, index: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return a leaf that is copied by ``dst.copy_(src)``, or raise the reason why its destination can't be written.

    Reasons: the destination or the leaf isn't a tensor, the shape or the device differs, or the destination requires
    grad, is expanded or is repeated. Any other destination has memory that only torch knows.
    """
    source, place, path = parts.leaves[index], places[index], parts.structure.path(index)
    source = source.obj if type(source) in WRAPPERS else source
    if not isinstance(place, torch.Tensor):
        raise _refusal(path, f"is a {type(place).__name__}, but batch{path} is a tensor", "pass a tensor there")
    if isinstance(source, np.ndarray):
        source = from_array(source)
    if not isinstance(source, torch.Tensor):
        raise _refusal(
            path,
            f"cannot take batch{path}, a {type(source).__name__}, which moves by its own .to()",
            "register_node() its class, or leave it out of both",
        )
    if place.shape != source.shape:
        raise _refusal(
            path,
            f"has shape {list(place.shape)}, but batch{path} has {list(source.shape)}",
            "pass a tensor of that shape",
        )
    if place.device != device:
        raise _refusal(path, f"is on {place.device}, but the call writes to {device}", "pass a tensor on that device")
    if place.requires_grad and torch.is_grad_enabled():
        raise _refusal(path, "requires grad, and grad mode is on", "call under torch.no_grad(), or pass its detach()")
    if place.layout is torch.strided and any(
        step == 0 and size > 1 for step, size in zip(place.stride(), place.shape, strict=True)
    ):
        raise _refusal(
            path,
            f"is expanded: shape {list(place.shape)}, stride {list(place.stride())}",
            "pass a tensor whose elements have memory of their own",
        )
    row = there.table.rows[index]
    if row["kind"] == RowKind.ALIAS:
        raise _overlap(parts.structure, int(row["offset"]), index, "is the same tensor as")
    return index, place, source.detach()


def _refusal(path: str, what: str, remedy: str) -> LayoutError:
    return LayoutError(f"out{path} {what}; {remedy}", path)


def _overlap(structure: Structure, one: int, other: int, how: str) -> LayoutError:
    first, second = structure.path(min(one, other)), structure.path(max(one, other))
    return _refusal(second, f"{how} out{first}, and their sources differ", "pass tensors that don't overlap")


def _overlapping(structure: Structure, places: list[Any], there: Parts, fits: Any) -> list[int]:
    """Return the destinations that overlap, which are written in the order of the batch. Two dense ones must not.

    Args:
        structure: the batch's structure.
        places: the destinations, by leaf.
        there: the description of the destinations.
        fits: which destinations to check.
    """
    chosen = (fits & (there.table.rows["nbytes"] > 0)).nonzero()[0]
    rows, (starts, steps) = there.table.rows[chosen], (column[chosen] for column in _memory(there))
    is_dense = rows["kind"] == RowKind.RAW
    reach = ((rows["shape"] - 1) * steps).sum(1) + 1
    ends = starts + np.where(is_dense, rows["nbytes"], reach * _ITEMSIZES[rows["dtype"]])
    order = np.argsort(starts, kind="stable")
    if not (starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any():
        return []
    found = []
    before: list[tuple[int, int, int, bool]] = []
    for span in zip(*(column[order].tolist() for column in (starts, ends, chosen, is_dense)), strict=True):
        start, _, leaf, leaf_is_dense = span
        before = [other for other in before if other[1] > start]
        for _, _, other, other_is_dense in before:
            if leaf_is_dense and other_is_dense:
                raise _overlap(structure, leaf, other, "overlaps")
            if _is_same_view(places[leaf], places[other]):
                raise _overlap(structure, leaf, other, "is the same view as")
            found += [leaf, other]
        before.append(span)
    return found
