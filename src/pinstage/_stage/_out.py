"""Copies into existing tensors (`out=`): the checks before the first byte, and the way of each leaf.

::

    batch, out --checks--> a destination for each tensor of the batch
      the same bytes there, large or neighbours   --packed, and copied straight to their places-->
      small, strided or cast                      --packed, one copy--> scratch --one _foreach_copy_-->
      tensors that cannot be packed               --dst.copy_(src)-->
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import (
    COPIED_AS_THEY_ARE,
    DTYPES,
    INTEGERS,
    PACKED,
    WRAPPERS,
    Blocks,
    Parts,
    RowKind,
    Structure,
    Table,
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
"""Destinations that are neighbours in the slab, and of this size together, have a copy of their own."""

_FEW_COPIES = 8
"""Up to this many smaller ones have it too: scratch costs an allocation and a kernel."""

SCRATCH_BYTES = 64 << 20
"""The most device memory that one call takes beside its destinations."""

NOTHING = take_apart([]).table
"""The offset table of no tensors: `out=` makes none."""

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Way(NamedTuple):
    """Leaves that go one way."""

    parts: Parts
    places: list[Any]
    """Where each goes, by its row."""


class Direct(NamedTuple):
    """Leaves that are copied from the slab straight to their places."""

    way: Way
    blocks: Blocks
    leaves: list[int]
    """Their numbers in the batch."""


class OutPlan(NamedTuple):
    """How a batch gets into existing tensors. Everything is checked."""

    parts: Parts
    leaves: list[Any]
    """The result: the destinations, and the batch's other leaves."""
    plain: list[tuple[int, torch.Tensor, torch.Tensor]]
    """Leaf, destination and source of what goes by ``dst.copy_(src)``."""
    scratch: list[int]
    """Leaves that go by way of scratch."""
    direct: list[int]
    """Leaves that go straight to their places, unless their copies are many and small."""
    whole: Direct | None = None
    """All of these, if they are all that is packed."""

    def ways(self) -> tuple[list[int], Direct | None]:
        """Return the leaves that go by way of scratch, and the others."""
        found = self.whole or self._direct(self.direct)
        small = [] if found is None else found.blocks.small_copies(DIRECT_FROM_BYTES, _FEW_COPIES)
        if not small:
            return self.scratch, found
        if len(self.direct) < self.parts.table.packed:
            small = [self.direct[row] for row in small]
        return sorted(self.scratch + small), self._direct(sorted(set(self.direct) - set(small)))

    def _direct(self, chosen: list[int]) -> Direct | None:
        if not chosen:
            return None
        way = self._way(chosen)
        return Direct(way, into_tensors(way.parts.table, way.places, self.leaves[chosen[0]].is_cuda), chosen)

    def _way(self, chosen: list[int]) -> Way:
        """Take some of the leaves apart, unless they are all that is packed."""
        if len(chosen) == self.parts.table.packed:
            return Way(self.parts, self.leaves)
        return Way(take_apart([self.parts.leaves[i] for i in chosen]), [self.leaves[i] for i in chosen])

    def through_scratch(self, chosen: list[int]) -> Iterator[Way]:
        """Yield leaves that fit scratch together."""
        parts = self.parts
        if parts.table.nbytes <= SCRATCH_BYTES:
            if chosen:
                yield self._way(chosen)
            return
        sources: list[Any] = []
        places: list[torch.Tensor] = []
        nbytes = 0
        for index in chosen:
            for source, place in _pieces(parts.leaves[index], self.leaves[index]):
                if sources and nbytes + source.nbytes > SCRATCH_BYTES:
                    yield Way(take_apart(sources), places)
                    sources, places, nbytes = [], [], 0
                sources.append(source)
                places.append(place)
                nbytes += source.nbytes
        if sources:
            yield Way(take_apart(sources), places)


def _pieces(source: Any, place: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """Cut a leaf that is larger than scratch, and its destination alike."""
    if source.nbytes <= SCRATCH_BYTES:
        yield source, place
        return
    tensor = source if isinstance(source, torch.Tensor) else from_array(source)
    assert tensor is not None
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(1, size * SCRATCH_BYTES // tensor.nbytes)
    for start in range(0, size, rows):
        count = min(rows, size - start)
        yield from _pieces(tensor.narrow(dim, start, count), place.narrow(dim, start, count))


# -- writing -----------------------------------------------------------------------------------------------------------


def copy_through(way: Way, scratch: Blocks) -> None:
    """Copy leaves from scratch to their places, in their order, on the current stream."""
    table = way.parts.table
    found, rows = scratch.leaves([None] * (table.others + table.moved)), table.positions(*PACKED)
    copy_all([way.places[row] for row in rows], [found[row] for row in rows])


def copy_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to others of their device, in order, bit for bit where the dtypes are the same."""
    with writing(places):
        for at, (place, source) in enumerate(zip(places, sources, strict=True)):
            if (dtype := place.dtype) not in COPIED_AS_THEY_ARE and dtype is source.dtype:
                integer = INTEGERS[place.itemsize]
                places[at], sources[at] = place.view(integer), source.view(integer)
        copy_each(places, sources)


@contextmanager
def writing(places: list[torch.Tensor]) -> Iterator[None]:
    """Let tensors be written by torch's own functions, whatever mode they were made in."""
    are_inference = not torch.is_inference_mode_enabled() and any(map(torch.Tensor.is_inference, places))
    places = list(places)
    with torch.inference_mode() if are_inference else torch.no_grad():
        yield
    if are_inference:  # in that mode torch counts no changes of other tensors
        torch.autograd.graph.increment_version(places)


# -- checks ------------------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """Destinations that may be written. Lists have numbers of leaves."""

    plain: list[tuple[int, torch.Tensor, torch.Tensor]]
    """Leaf, destination and source of what goes by ``dst.copy_(src)``."""
    direct: list[int]
    """Their bytes at the destination are those in the slab."""
    others: list[int]
    """Other packed leaves, to be cast or strided."""


def plan_for(parts: Parts, out: Any, device: torch.device) -> OutPlan:
    """Check existing tensors against a batch, and decide how each leaf of it gets there. Writes nothing.

    Args:
        parts: of the batch.
        out: a nest of the batch's structure.
        device: where the destinations have to be.

    Raises:
        LayoutError: another structure or shape; a destination that isn't a tensor, is on another device, is expanded or
            requires grad; or two destinations that overlap.
        IsContainer: take the batch apart again.
    """
    places = in_order(parts.structure, out)
    table = parts.table
    if table.packed + table.others == len(places) and fit_as_they_are(table, places, device):
        leaves = results(parts, places) if table.others else places
        chosen = table.positions(*PACKED) if table.others else list(range(len(places)))
        if not chosen:
            return OutPlan(parts, leaves, [], [], [])
        direct = Direct(Way(parts, leaves), into_tensors(table, leaves, leaves[chosen[0]].is_cuda), chosen)
        return OutPlan(parts, leaves, [], [], chosen, direct)
    readable = make_readable(parts, places)
    if readable is not None:
        parts = describe(readable, parts.structure, _CPU)
    plain, same, scratch = check(parts, [parts.table], places, device)
    return OutPlan(parts, results(parts, places), plain, scratch, same)


def check(parts: Parts, tables: list[Table], places: list[Any], device: torch.device) -> Checked:
    """Check the destination of each tensor of a batch.

    Args:
        parts: of the batch.
        tables: of `parts`, first, and of its leaves on other devices; each leaf is packed in one of them at most.
        places: the destinations, by leaf.
        device: where they have to be.

    Raises:
        LayoutError, IsContainer: as `plan_for`.
    """
    structure, there = parts.structure, _described(parts, places, device)
    count = structure.num_leaves
    packed, checked, same = (np.zeros(count, dtype=np.bool) for _ in range(3))
    for table in tables:
        mine = np.zeros(count, dtype=np.bool)
        mine[table.positions(*PACKED)] = True
        packed |= mine
        fits = mine & _fit(table, there)
        checked |= fits
        same |= fits & _have_same_bytes(table, there)
    moved = np.zeros(count, dtype=np.bool)
    moved[parts.table.positions(RowKind.MOVED)] = True
    rest = ((packed | moved) & ~checked).nonzero()[0].tolist()
    plain = [_by_itself(structure, parts.leaves, places, there, device, index) for index in rest]
    _check_overlaps(structure, there, checked, same)
    direct, others = (mask.nonzero()[0].tolist() for mask in (same, checked & ~same))
    return Checked(plain, direct, others)


def results(parts: Parts, places: list[Any]) -> list[Any]:
    """Return what the leaves of a batch are then: the destinations of tensors, and the batch's other leaves."""
    leaves = [leaf.obj if type(leaf) in WRAPPERS else leaf for leaf in parts.leaves]
    for index in parts.table.positions(*PACKED, RowKind.MOVED, RowKind.ALIAS):
        leaves[index] = places[index]
    return leaves


def in_order(structure: Structure, out: Any) -> list[Any]:
    """Return the leaves of `out`, in the order of the batch's."""
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
            f"out has another structure than the batch: {found} instead of {structure}{which}; pass a nest of the same "
            "containers and keys, such as an earlier result of to_device",
            path,
        )
    by_path = dict(zip(theirs, leaves, strict=True))
    return [by_path[path] for path in paths]


def make_readable(parts: Parts, places: list[Any]) -> list[Any] | None:
    """Return the leaves of a batch to describe in place of its own, if some have to be packed that otherwise are not.

    These are tensors that require grad, which are read detached, and a tensor that comes twice but goes to two places.
    """
    leaves, rows = list(parts.leaves), parts.table.rows
    changed = False
    for index in parts.table.positions(RowKind.MOVED):
        leaf = leaves[index]
        if type(leaf) is torch.nn.Parameter or (type(leaf) is torch.Tensor and leaf.requires_grad):
            leaves[index], changed = leaf.detach(), True
    for index in parts.table.positions(RowKind.ALIAS):
        first = int(rows["offset"][index])
        if not _is_same_view(places[index], places[first]):
            leaf = leaves[first]
            leaves[index] = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf.view()
            changed = True
    return leaves if changed else None


def _is_same_view(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.layout is other.layout is torch.strided
        and (one.data_ptr(), one.dtype, one.shape, one.stride())
        == (other.data_ptr(), other.dtype, other.shape, other.stride())
    )


def _described(parts: Parts, places: list[Any], device: torch.device) -> Parts:
    """Describe the destinations, each of which is written once; parameters among them by their memory."""
    leaves: list[Any] = list(places)
    for index in parts.table.positions(RowKind.OTHER, RowKind.ALIAS):
        leaves[index] = None
    there = describe(leaves, parts.structure, device, arrays=False)
    changed = False
    for index in there.table.positions(RowKind.MOVED):
        leaf = leaves[index]
        is_plain = type(leaf) in _PLAIN and leaf.layout is torch.strided and leaf.device == device
        if is_plain and not (leaf.requires_grad and torch.is_grad_enabled()):
            leaves[index], changed = leaf.detach(), True
    return describe(leaves, parts.structure, device, arrays=False) if changed else there


def _fit(table: Table, there: Parts) -> Any:
    """Say which destinations are plain memory of their leaf's shape, each element at an address of its own."""
    mine, theirs, steps = table.rows, there.table.rows, _steps(there)
    kind, width = theirs["kind"], min(mine["shape"].shape[1], theirs["shape"].shape[1])
    alike = (mine["ndim"] == theirs["ndim"]) & (mine["shape"][:, :width] == theirs["shape"][:, :width]).all(1)
    expanded = (kind != RowKind.RAW) & ((steps[:, 1:] == 0) & (theirs["shape"] > 1)).any(1)
    return (kind >= RowKind.RAW) & (kind <= RowKind.LAZY) & alike & ~expanded


def _steps(there: Parts) -> Any:
    """Return the address of each destination, and its stride, which is of strided ones alone."""
    width = there.table.rows["shape"].shape[1]
    return np.frombuffer(there.sources, dtype=np.int64).reshape(-1, 1 + width)


def _have_same_bytes(table: Table, there: Parts) -> Any:
    """Say which leaves have the same bytes in the slab as they have to have at their places."""
    mine, theirs = table.rows, there.table.rows
    width = min(mine["shape"].shape[1], theirs["shape"].shape[1])
    steps = (mine["stride"][:, :width] == theirs["stride"][:, :width]) | (mine["shape"][:, :width] < 2)
    return (theirs["kind"] == RowKind.RAW) & (mine["dtype"] == theirs["dtype"]) & steps.all(1)


def _by_itself(
    structure: Structure, leaves: list[Any], places: list[Any], there: Parts, device: torch.device, index: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return a leaf that goes by ``dst.copy_(src)``, or say why its destination can't be written.

    The cases: `out` has no tensor there, or the batch has an object that is none; another shape or device; a tensor
    that requires grad; an expanded one; a repeated one. The rest is memory that only torch knows.
    """
    source, place, path = leaves[index], places[index], structure.path(index)
    source = source.obj if type(source) in WRAPPERS else source
    if not isinstance(place, torch.Tensor):
        raise _refusal(path, f"is a {type(place).__name__}, and batch{path} a tensor", "pass a tensor there")
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
            path, f"has shape {list(place.shape)}, and batch{path} {list(source.shape)}", "pass a tensor of that shape"
        )
    if place.device != device:
        raise _refusal(path, f"is on {place.device}, and the call writes to {device}", "pass a tensor on that device")
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
        raise _overlap(structure, int(row["offset"]), index, "is the same tensor as")
    return index, place, source.detach()


def _refusal(path: str, what: str, remedy: str) -> LayoutError:
    return LayoutError(f"out{path} {what}; {remedy}", path)


def _overlap(structure: Structure, one: int, other: int, how: str) -> LayoutError:
    first, second = structure.path(min(one, other)), structure.path(max(one, other))
    return _refusal(second, f"{how} out{first}, and their sources differ", "pass tensors that don't overlap")


def _check_overlaps(structure: Structure, there: Parts, checked: Any, same: Any) -> None:
    """Refuse destinations that overlap; strided ones may, and are written in the order of the batch.

    Args:
        structure: of the batch.
        there: the destinations.
        checked: which of them are looked at.
        same: which of these are written directly; those that a strided one overlaps are taken out.
    """
    rows, steps = there.table.rows, _steps(there)
    chosen = (checked & (rows["nbytes"] > 0)).nonzero()[0]
    starts = steps[chosen, 0]
    ends = starts + rows["nbytes"][chosen]
    for at in (rows["kind"][chosen] != RowKind.RAW).nonzero()[0].tolist():
        row = rows[chosen[at]]
        dtype = DTYPES[row["dtype"]]
        assert dtype is not None
        reach = int(((row["shape"] - 1) * steps[chosen[at], 1:])[: row["ndim"]].sum())
        ends[at] = starts[at] + (reach + 1) * dtype.itemsize
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if not (starts[1:] < np.maximum.accumulate(ends)[:-1]).any():
        return
    before: list[tuple[int, int]] = []
    for leaf, start, end in zip(chosen[order].tolist(), starts.tolist(), ends.tolist(), strict=True):
        before = [(other, until) for other, until in before if until > start]
        for other, _ in before:
            one, two = rows[leaf], rows[other]
            if one["kind"] == two["kind"] == RowKind.RAW:
                raise _overlap(structure, leaf, other, "overlaps")
            is_same = one["dtype"] == two["dtype"] and (one["shape"] == two["shape"]).all()
            if is_same and (steps[leaf] == steps[other]).all():
                raise _overlap(structure, leaf, other, "is the same view as")
            same[[leaf, other]] = False
        before.append((leaf, end))
