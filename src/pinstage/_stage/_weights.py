"""`Stager.load_weights`: copies of a checkpoint's tensors, in groups.

::

    tensors      mapping, pairs, or safetensors' safe_open; read in its order, group by group
    known names  names, devices and known shapes are checked before the first byte is written
    each group   host tensors --staged--> device --copied--> destinations of a module or dict;
                 those on meta are made just before

The packing threads take the page faults of mapped files, each group while the one before is copied.
At most two groups are on the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch

from .._batch import ALIGNMENT, Matched, Whole
from .._compat.calls import (
    changes_its_loading,
    check_checkpoints_are_known,
    may_lack_counter,
    modules_by_path,
    tensors_of,
)
from .._compat.views import range_of
from .._pool import Fence
from .._sizes import format_bytes, round_up, size_to_paste
from ..errors import AcquireTimeoutError
from ._out import fill, prepare
from ._sender import PendingSend, Sender
from ._transfer import leaves_of

GROUP_BYTES = 64 << 20
"""The most bytes of a group. The bus takes 1.2 ms for them, more than ten times as long as starting
a group.
"""

_LEAST_CAP = 64 << 10
"""The smallest cap: a group has half of it, and starting a group takes as long as copying this."""

SAMPLE_BYTES = 64
"""Bytes at the start, in the middle and at the end of a tensor that `Destination.check_unchanged`
compares.
"""


class IncompatibleKeys(NamedTuple):
    """Names that a module and a checkpoint don't share; ``torch.nn.Module.load_state_dict`` returns
    the same pair.
    """

    missing_keys: list[str]
    """Names of tensors that weren't loaded, under this name or another."""
    unexpected_keys: list[str]
    """Names that the module or dict doesn't have."""


K = TypeVar("K")
Shape: TypeAlias = tuple[int, ...] | None
"""None for values that aren't tensors."""


class _Checkpoint(NamedTuple):
    names: Collection[str] | None
    """None if the names aren't known before everything is read."""
    shapes: Mapping[str, Shape]
    """Shapes that are known before."""
    read: Callable[[str], Any] | None
    """Reads a tensor by name; None if the names aren't known."""
    may_reuse_memory: bool
    """Whether reading a tensor may overwrite those that were read before."""


def _opened(tensors: Any) -> _Checkpoint:
    if hasattr(tensors, "get_slice"):  # safe_open is neither a mapping nor an iterable
        names = tensors.keys()
        shapes: Any = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return _Checkpoint(names, shapes, tensors.get_tensor, False)
    if isinstance(tensors, Mapping):
        # It has all its tensors, unless its class makes them when they are read.
        has_all = type(tensors) in (dict, OrderedDict)
        shapes = {name: _shape_of(tensors[name]) for name in tensors} if has_all else {}
        return _Checkpoint(list(tensors), shapes, tensors.__getitem__, not has_all)
    if isinstance(tensors, Iterable) and not isinstance(tensors, str | bytes | torch.Tensor):
        return _Checkpoint(None, {}, None, True)
    raise _not_a_checkpoint(tensors, f"a {type(tensors).__name__}")


def _pair(item: Any) -> tuple[str, Any]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise _not_a_checkpoint(item, f"an iterable that yields a {type(item).__name__}")


def _not_a_checkpoint(value: object, kind: str) -> TypeError:
    reader = "torch.load(path, mmap=True)"
    if isinstance(value, str | bytes | os.PathLike) and os.fsdecode(value).endswith(".safetensors"):
        reader = 'safe_open(path, framework="pt")'
    return TypeError(
        "tensors must be a mapping, pairs of name and tensor, or safetensors' safe_open: "
        f"{kind}. Pass for example {reader}"
    )


class Write(NamedTuple):
    """A tensor, or a piece of one, and the tensor it is copied to."""

    name: str
    source: Any
    destination: torch.Tensor
    key: Any
    """Writes with the same key are in different groups: the later one counts."""
    ends_group: bool
    """Whether it must be copied before the next one is read."""


class Destination:
    """The tensors of a module or dict, and which of them were read.

    Args:
        target: the module or dict.
        device: where its tensors are, or are made.
        metadata: the checkpoint's versions by path of a module, as in torch's state dicts.
        strict: whether missing and unexpected names are errors.

    Attributes:
        tensors: the tensors that a checkpoint has, by name, in the order of `load_state_dict`.
        keys: a key for each name, equal for names that share a tensor or its memory.
        unexpected: names of the checkpoint that aren't here.
    """

    def __init__(
        self, target: Any, device: torch.device, metadata: Mapping[str, Any], *, strict: bool
    ) -> None:
        self._target, self._device, self._strict = target, device, strict
        self._metadata = metadata
        self.tensors: dict[str, Any] = {}
        self._all: dict[str, Any] = {}
        self._removed: tuple[str, ...] = ()
        self._counters: set[str] = set()  # that the checkpoint may lack
        if isinstance(target, torch.nn.Module):
            self._read_module(target)
        elif isinstance(target, dict):
            for name, tensor in target.items():
                if not isinstance(tensor, torch.Tensor):
                    raise TypeError(
                        f"{name} must be a tensor to load into: {type(tensor).__name__}. Leave it "
                        "out"
                    )
            self.tensors = self._all = target
        else:
            raise TypeError(
                "load_weights loads a torch.nn.Module or a dict of tensors: "
                f"{type(target).__name__}"
            )
        self.keys = {name: _key_of(tensor) for name, tensor in self._all.items()}
        self.unexpected: list[str] = []
        self._positions = {name: position for position, name in enumerate(self.tensors)}
        # Keys of tensors whose memory overlaps another's. Names of one tensor share a key.
        self._overlapping = overlapping(
            {self.keys[name]: _span_of(_local(tensor)) for name, tensor in self.tensors.items()}
        )
        self._last_read: dict[Any, int] = {}  # by key, the last position that was read
        self._samples: dict[str, tuple[torch.Tensor, bytes | None]] = {}  # until they are checked

    def _read_module(self, target: torch.nn.Module) -> None:
        """Find a module's tensors as `load_state_dict` does, whatever its `state_dict` returns."""
        check_checkpoints_are_known()
        for path, module in modules_by_path(target):
            prefix = f"{path}." if path else ""
            if module is None:
                self._removed += (prefix,)
                continue
            if changes_its_loading(module):
                raise TypeError(
                    f"load_weights can't load {path or 'the module'}: {type(module).__name__} has "
                    "a _load_from_state_dict of its own, a load hook or extra state. Use "
                    "load_state_dict, or pass a dict of its tensors"
                )
            if may_lack_counter(module, self._metadata.get(path, {})):
                self._counters.add(f"{prefix}num_batches_tracked")
            for name, tensor, is_persistent in tensors_of(module):
                self._all[prefix + name] = tensor
                if is_persistent:
                    self.tensors[prefix + name] = tensor

    def plan(self, names: Collection[str] | None, shapes: Mapping[str, Shape]) -> list[str]:
        """Check a checkpoint's names, and return those to read, in this order.

        Args:
            names: None if they aren't known before the tensors are read; then only the module is
                checked.
            shapes: those that are known.
        """
        if names is None:
            self._check({self.keys[name] for name in self.tensors}, [])
            return []
        self.unexpected = [name for name in names if self._is_unexpected(name)]
        known = [name for name in names if name in self.tensors]
        problems = [
            problem
            for name in known
            if (problem := self._problem_of(name, shapes.get(name, self.tensors[name].shape)))
        ]
        self._check({self.keys[name] for name in known}, problems)
        return self._in_order(known, shapes)

    def _in_order(self, names: list[str], shapes: Collection[str]) -> list[str]:
        """Return the names to read, so that `parts` needn't skip or keep a tensor whose shape is
        known.
        """
        positions, keys = self._positions, self.keys
        last = {keys[name]: name for name in sorted(names, key=positions.__getitem__)}
        wanted = [name for name in names if last[keys[name]] == name or name not in shapes]
        return sorted(
            wanted, key=lambda name: positions[name] if keys[name] in self._overlapping else -1
        )

    def parts(
        self,
        pairs: Iterable[tuple[str, Any]],
        *,
        may_reuse_memory: bool,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor that is to be copied, by name.

        Copied in this order, they leave what `load_state_dict` leaves, which copies in the module's
        order: a tensor is skipped if a later name of its destination was read, and tensors whose
        destinations overlap come last.

        Args:
            pairs: names and tensors, as they are read.
            may_reuse_memory: whether `check_unchanged` looks at these tensors.
        """
        put_off: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in pairs:
            if name not in self.tensors:
                self._pass_over(name)
                continue
            if problem := self._problem_of(name, _shape_of(tensor)):
                self._refuse([problem])
            key, position = self.keys[name], self._positions[name]
            if position < self._last_read.get(key, 0):
                continue
            self._last_read[key] = position
            part = self._part_of(name, tensor)
            if may_reuse_memory:
                self._samples[name] = part, _sample_of(part)
            if key in self._overlapping:
                put_off[position] = name, part
            else:
                yield name, part
        for position in sorted(put_off):
            yield put_off[position]

    def write(self, name: str, part: torch.Tensor) -> Write:
        """Return the write of a tensor that `parts` yielded.

        It ends its group if it must be copied before the next tensor is read: the memory of their
        destinations may overlap, or `check_unchanged` can't compare the tensor.
        """
        is_unknown = name in self._samples and self._samples[name][1] is None
        ends_group = is_unknown or self.keys[name] in self._overlapping
        destination = self.local(name)
        if destination.layout is torch.strided:  # the copy replaces the parts of a sparse one
            destination = destination.detach()
        return Write(name, part.detach(), destination, self.keys[name], ends_group)

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Raise an error if a tensor was overwritten after it was read. Call it when a group is
        packed.

        Args:
            names: of the group's tensors. The last one may go on in the next group, where it is
                compared again.
        """
        for name in names:
            part, sample = self._samples.get(name, (None, None))
            if part is not None and sample is not None and sample != _sample_of(part):
                problem = (
                    f"{name} was overwritten after it was read: {part.nbytes} bytes of shape "
                    f"{list(part.shape)}. Tensors of an iterable have to stay unchanged until "
                    "load_weights returns; yield tensor.clone(), or let the reader use new memory "
                    "for each tensor."
                )
                self._refuse([problem])
        for name in list(names)[:-1]:
            self._samples.pop(name, None)

    def result(self) -> IncompatibleKeys:
        """Return the names that weren't read or aren't here, or raise the error of
        `load_state_dict`.
        """
        self._check(self._last_read, [])
        for name in self._counters & self.tensors.keys():
            if self._all[name].is_meta:
                self.local(name).zero_()
        return IncompatibleKeys(self._lacking(self.tensors, self._last_read), self.unexpected)

    def _is_unexpected(self, name: str) -> bool:
        """Return whether `load_state_dict` reports a name: not if it is in a module that None
        replaced.
        """
        return name not in self.tensors and not str(name).startswith(self._removed)

    def _pass_over(self, name: str) -> None:
        if self._is_unexpected(name):
            if self._strict:
                self._refuse([_line("Unexpected key(s) in state_dict", [name])])
            self.unexpected.append(name)

    def _problem_of(self, name: str, shape: Shape) -> str | None:
        """Return why a tensor of this shape can't be loaded; None if it can."""
        tensor = self._all[name]
        if shape is None:
            return f"{name} in state_dict isn't a tensor."
        is_scalar = not tensor.dim() and shape == (1,)  # torch 0.3 had no 0-d tensors
        if tensor.shape != shape and not is_scalar:
            return (
                f"size mismatch for {name}: copying a param with shape {torch.Size(shape)} from "
                f"checkpoint, the shape in current model is {tensor.shape}."
            )
        if _is_dtensor(tensor):
            if not {type(placement).__name__ for placement in tensor.placements} <= {
                "Shard",
                "Replicate",
            }:
                return (
                    f"{name} has placements {tensor.placements}; load_weights knows plain Shard "
                    "and Replicate."
                )
        elif tensor.is_meta and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{name} is a {type(tensor).__name__} on meta; make it on the device first."
        device = _local(tensor).device
        if device.type != "meta" and device != self._device:
            return (
                f"{name} is on {device}, the stager is for {self._device}; move it, or make a "
                "stager for its device."
            )
        return None

    def _check(self, loaded: Collection[Any], problems: list[str]) -> None:
        """Raise the error of `load_state_dict`, if anything is wrong.

        Args:
            loaded: keys of the tensors that are loaded, or will be.
            problems: found by `_problem_of`.
        """
        missing = self._lacking(self.tensors, loaded) if self._strict else []
        named = {*loaded, *(self.keys[name] for name in missing)}
        on_meta = [name for name, tensor in self._all.items() if tensor.is_meta]
        listed = {
            "Missing key(s) in state_dict": missing,
            "Unexpected key(s) in state_dict": self.unexpected if self._strict else [],
            "Still on meta after loading": self._lacking(on_meta, named),
        }
        lines = [_line(what, names) for what, names in listed.items() if names]
        if lines or problems:
            self._refuse([*lines, *problems])

    def _lacking(self, names: Iterable[str], keys: Collection[Any]) -> list[str]:
        """Return the names whose tensors aren't among the keys, although they have to be loaded."""
        return [
            name for name in names if self.keys[name] not in keys and name not in self._counters
        ]

    def _refuse(self, problems: list[str]) -> NoReturn:
        lines = "\n\t".join(problems)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(self._target).__name__}:\n\t{lines}"
        )

    def _part_of(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of global shape."""
        tensor = self._all[name]
        if source.dim() != tensor.dim():  # one element for a 0-d tensor
            source = source[0]
        if _is_dtensor(tensor):
            mesh = tensor.device_mesh
            if mesh.get_coordinate() is None:  # this rank isn't in the mesh
                return source.new_empty(0)
            for placement, index, count in zip(
                tensor.placements, mesh.get_coordinate(), mesh.shape, strict=True
            ):
                # As torch.chunk splits; a second shard splits the part of the first.
                if placement.is_shard():
                    size = source.shape[placement.dim]
                    begin = min(index * -(-size // count), size)
                    source = source.narrow(
                        placement.dim, begin, min(-(-size // count), size - begin)
                    )
        return source

    def local(self, name: str) -> torch.Tensor:
        """Return the plain tensor to write to; one on meta is made first, for all names that share
        it.
        """
        tensor, part = self._all[name], _local(self._all[name])
        if not part.is_meta:
            return part
        made = part = torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=self._device
        )
        if _is_dtensor(tensor):
            made = type(tensor).from_local(
                part,
                tensor.device_mesh,
                tensor.placements,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        for other in [other for other, shared in self._all.items() if shared is tensor]:
            self._all[other] = made
            if isinstance(self._target, torch.nn.Module):
                path, _, key = other.rpartition(".")
                setattr(self._target.get_submodule(path), key, made)
            else:
                self._target[other] = made
        return part


def _check_cap(max_bytes: int) -> None:
    if max_bytes < _LEAST_CAP:
        raise ValueError(
            f"the pool is too small to load weights: its cap is {format_bytes(max_bytes)}. Pass "
            f'max_bytes="{size_to_paste(_LEAST_CAP)}" or more'
        )


# -- groups ----------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(sender: Sender, target: Any, tensors: Any, *, strict: bool) -> IncompatibleKeys:
    """Copy a checkpoint's tensors to their destinations; see `Stager.load_weights`."""
    _check_cap(sender.slabs.pool.max_bytes)
    metadata = getattr(tensors, "_metadata", None) or {}
    destination = Destination(target, sender.target.device, metadata, strict=strict)
    sender = replace(sender, own_storage=False, keeping=None)  # each group is in one device slab
    names, shapes, read, may_reuse_memory = _opened(tensors)
    wanted = destination.plan(names, shapes)
    pairs = map(_pair, tensors) if read is None else ((name, read(name)) for name in wanted)
    parts = destination.parts(pairs, may_reuse_memory=may_reuse_memory)
    groups = _Groups(sender, destination.check_unchanged if may_reuse_memory else None)
    try:
        writes = (destination.write(name, part) for name, part in parts)
        for group in groups_of(writes, min(GROUP_BYTES, sender.slabs.largest() // 2)):
            groups.start(group)
            # Then the next group isn't read earlier.
            groups.finish(all_but=0 if may_reuse_memory or group[-1].ends_group else 1)
        groups.finish()
    finally:
        groups.close()
    return destination.result()


class _Started(NamedTuple):
    """A group that is being packed."""

    names: list[str]
    pending: PendingSend
    existing: list[Any]
    matched: Matched


class _Groups:
    """Groups on their way: one is packed while the one before is sent, and two are on the device.

    Args:
        sender: stages them.
        check: called with the names of a group when it is packed, before it is written.
    """

    def __init__(self, sender: Sender, check: Callable[[list[str]], None] | None) -> None:
        self._sender, self._check = sender, check
        self._started: deque[_Started] = deque()
        self._written: deque[Fence | None] = deque()

    def start(self, group: list[Write]) -> None:
        """Check a group's destinations, and let threads begin to pack it."""
        sources = {(write.name, number): write.source for number, write in enumerate(group)}
        parts = self._sender.take_apart(sources)
        existing: list[Any] = [write.destination for write in group]
        matched = prepare(parts, existing, self._sender.target.device)
        try:
            pending = self._sender.start(parts, timeout=0)
        except AcquireTimeoutError:
            self.finish()  # with its slab, two loads could wait for each other's
            pending = self._sender.start(parts)
        names = list(dict.fromkeys(write.name for write in group))
        self._started.append(_Started(names, pending, existing, matched))

    def finish(self, all_but: int = 0) -> None:
        """Send the groups that were started, apart from the last ones, and copy them into place."""
        target = self._sender.target
        while len(self._started) > all_but:
            if len(self._written) > 1 and (event := self._written.popleft()) is not None:
                event.synchronize()  # or a third group would need memory
            names, pending, existing, matched = self._started.popleft()
            transfer = self._sender.finish(pending)
            if self._check is not None:
                self._check(names)
            fill(existing, leaves_of(transfer), matched)
            self._written.append(target.record(target.consumer(None)))

    def close(self) -> None:
        """Stop packing, after an error."""
        for group in self._started:
            group.pending.close(None)


def groups_of(writes: Iterable[Write], group_bytes: int) -> Iterator[list[Write]]:
    """Yield groups of at most `group_bytes` in a slab, in order; larger tensors are cut into
    several.
    """
    group: list[Write] = []
    keys: set[Any] = set()
    room = group_bytes
    for write in writes:
        is_again = write.key in keys
        for piece, needed in _pieces(write, group_bytes):
            if group and (needed > room or is_again):
                yield group
                group, keys, room, is_again = [], set(), group_bytes, False
            group.append(piece)
            keys.add(piece.key)
            room -= round_up(needed, ALIGNMENT)
        if room <= 0 or write.ends_group:
            yield group
            group, keys, room = [], set(), group_bytes
    if group:
        yield group


def _pieces(write: Write, most: int) -> Iterator[tuple[Write, int]]:
    """Cut a tensor, and its destination in the same way, along the destination's largest stride.

    Yields:
        Pieces of at most `most` bytes in a slab, and the bytes of each.
    """
    tensor, destination = write.source, write.destination
    is_dense = tensor.layout is torch.strided
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1] if is_dense else []
    if not is_dense or tensor.nbytes <= most or not dims:
        yield write, tensor.nbytes if is_dense else 0
    elif destination.layout is not torch.strided or hasattr(destination, "__tensor_flatten__"):
        yield write._replace(source=Whole(tensor)), 0  # moves by its own .to(), so it needs no slab
    else:
        dim = max(dims, key=destination.stride)
        size = tensor.shape[dim]
        rows = max(1, size * most // tensor.nbytes)
        for start in range(0, size, rows):
            count = min(rows, size - start)
            source, there = tensor.narrow(dim, start, count), destination.narrow(dim, start, count)
            yield from _pieces(write._replace(source=source, destination=there), most)


# -- memory ----------------------------------------------------------------------------------------


def _line(what: str, names: list[str]) -> str:
    return f"{what}: " + ", ".join(f'"{name}"' for name in names) + ". "


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # If it isn't loaded, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> torch.Tensor:
    """Return a tensor, or this rank's part of a DTensor."""
    local: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor
    return local


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the byte behind its last; -1 if only
    torch knows them.
    """
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return -1, -1
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return -1, -1
    if not start and tensor.numel():  # on meta, or in other tensors, as in a quantised weight
        return -1, -1
    begin, end = range_of(tensor)
    return start, start + end - begin


def _key_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors of the same elements in memory."""
    local = _local(tensor)
    start, end = _span_of(local)
    return (start, local.dtype, local.shape, local.stride()) if start < end else id(tensor)


def overlapping(spans: dict[K, tuple[int, int]]) -> set[K]:
    """Return the keys of tensors whose memory may overlap that of another.

    Args:
        spans: the addresses of each tensor's first byte, and of the byte behind its last.
    """
    shared: set[K] = set()
    furthest, last = 0, None
    for key, (start, end) in sorted(spans.items(), key=itemgetter(1)):
        if last is not None and start < min(end, furthest):  # an empty one overlaps none
            shared |= {last, key}
        if end > furthest:
            furthest, last = end, key
    return shared


def _sample_of(tensor: torch.Tensor) -> bytes | None:
    """Return a tensor's first, middle and last bytes; None if it isn't a plain tensor in host
    memory.

    If there are gaps between its elements, only three elements, since the gaps aren't the tensor's.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    start, end = _span_of(tensor)
    if start == end:
        return None
    width = min(SAMPLE_BYTES, end - start)
    middle = (start + end - width) // 2
    if end - start != tensor.nbytes:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        width = tensor.element_size()
        middle = start + width * sum(size // 2 * stride for size, stride in steps)
    return b"".join(ctypes.string_at(address, width) for address in (start, middle, end - width))


def _shape_of(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
