"""`frozen_module`: a module that isn't trained is on the device only inside a block.

::

    module's tensors --once--> slabs of the pool; outside the block, they are views of the slabs
    onload            one copy per slab, on a side stream --> device memory
    with handle:      the module's tensors are views of the device memory
    end of the block  buffers are copied back; the device memory is freed

Memory is copied by storage, not by tensor, so that tied weights, views and strides stay as they
are.

Versions of tensors don't count every change: writes through ``.data`` are missing, and the
statistics that kernels of batch norm write. So the end of a block copies buffers back whether torch
has counted a change or not. It compares the module with its state before the block, and decides
before it changes anything: an error leaves the module as it was.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from .._compat.registered import Registered, entries_of
from .._compat.storages import version_of
from .._compat.views import range_of, tensor_over, view_of
from .._pool import SlabPool, check_pool, hold_for_good
from .._sizes import round_up
from .._stage import (
    SLAB_BYTES,
    Arrival,
    HostCopy,
    HostSlabs,
    Target,
    overlapping,
    shared_targets,
    target_for,
)
from ..errors import BudgetExceededError
from ._block import ALIGNMENT, OWNER, bytes_of, drop_arrival, has_plain_memory, keep_until
from ._offloaded import Offloaded, OffloadedStats

COPIED_BACK_BYTES = 64 << 20
"""Buffers of at most this size in all are copied back by every block: in 1.2 ms, at the bandwidth
of the bus.
"""

ACQUIRE_SECONDS = 60.0
"""Timeout for a slab, the same as a `Stager`'s default."""

_holders: weakref.WeakValueDictionary[int, FrozenModule] = weakref.WeakValueDictionary()
"""The handles that hold tensors, by the tensor's id, and by its storage's address on the host."""


class Held(NamedTuple):
    """A parameter or buffer, and its bytes in a slab."""

    tensor: torch.Tensor
    """The module's own object."""
    paths: list[str]
    """Its names in the module; a tied tensor has several."""
    slab: int
    begin: int
    """Byte offset in the slab, and in its copy on the device."""
    host: torch.Tensor
    """View of the slab: the tensor's content outside the ``with`` block."""

    @property
    def span(self) -> int:
        """The number of bytes from the tensor's first one to its last one."""
        begin, end = range_of(self.host)
        return end - begin

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of its first byte on the host, and of the byte behind the last one."""
        begin = self.host.data_ptr()
        return begin, begin + self.span

    @property
    def name(self) -> str:
        """The paths, for messages."""
        return " = ".join(self.paths)

    @property
    def owners(self) -> set[str]:
        """The paths of the submodules that have the tensor."""
        return {path.rpartition(".")[0] for path in self.paths}

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, torch.nn.Parameter)

    def is_now(self, tensor: torch.Tensor | None, now: dict[str, torch.Tensor]) -> bool:
        """Return whether the module has a given tensor under all names of the held one."""
        return {id(now.get(path)) for path in self.paths} == {id(tensor)}

    def is_unmoved(self, now: dict[str, torch.Tensor], memory: torch.Tensor) -> bool:
        """Return whether the module has the held tensor, as the same view of a slab, or of the
        slab's copy.
        """
        tensor, host = self.tensor, self.host
        if not self.is_now(tensor, now):
            return False
        if not has_plain_memory(tensor) or tensor.device != memory.device:
            return False
        if (tensor.shape, tensor.stride(), tensor.dtype) != (host.shape, host.stride(), host.dtype):
            return False
        return not host.numel() or tensor.data_ptr() == memory.data_ptr() + self.begin

    def can_keep_values(self, now: dict[str, torch.Tensor]) -> bool:
        """Return whether this is a buffer, and the module has one tensor of the same shape and
        dtype for it.
        """
        tensor = now.get(self.paths[0])
        if self.is_parameter or not self.is_now(tensor, now):
            return False
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_meta or tensor.is_nested:
            return False
        return (tensor.shape, tensor.dtype) == (self.host.shape, self.host.dtype)


class Outcome(NamedTuple):
    """A decision about the end of a block, made before anything is changed."""

    lost: set[str]
    """Tensors whose changes can't be kept. If there are any, no change of the block is kept."""
    values: list[tuple[Held, torch.Tensor]]
    """Buffers that were replaced or re-strided, each with a copy of its values on the host."""
    copies: dict[int, tuple[int, int]]
    """The bytes to copy back; see `_ranges`."""


NOTHING = Outcome(set(), [], {})


class FrozenModule(Offloaded):
    """A module that is on the host, except inside its block.

    ``_before`` is the module before the block, and None outside. ``_outcome`` is None while the
    block runs. It is decided once, so that a second call of `offload` completes an interrupted one.
    """

    def __init__(self, module: torch.nn.Module, pool: SlabPool, target: Target) -> None:
        self._module = module
        self._target = target
        self._arrivals: list[Arrival] = []
        self._versions: list[int] = []
        self._before: Registered | None = None
        self._outcome: Outcome | None = None
        self._tensors = _tensors_of(module)
        for path, tensor in self._tensors.items():
            _check(path, tensor)
        with torch.inference_mode(False):
            parts = _used_parts(self._tensors)
            self._slabs = _acquire(_arrange(parts), pool)
            self._held = [held for part in parts for held in _move(part, self._slabs[part.slab])]
        self._overlapping = overlapping({held.name: held.addresses for held in self._held})
        self._keys = {id(held.tensor) for held in self._held}
        storages = {held.host.untyped_storage().data_ptr() for held in self._held}
        self._keys |= storages - {0}  # of an empty tensor
        _holders.update(dict.fromkeys(self._keys, self))

    def stats(self) -> OffloadedStats:
        """Return the bytes on the host and on the device. Doesn't block."""
        return OffloadedStats(
            host_bytes=sum(slab.numel() for slab in self._slabs),
            device_bytes=sum(arrival.there.numel() for arrival in self._arrivals),
        )

    def onload(self) -> None:
        """Start copying to the device, behind earlier work of the current stream. Doesn't block.

        The module's tensors stay on the host until the block is entered. To overlap the copy with
        other work, call this before you enqueue that work.

        Raises:
            RuntimeError: a parameter or buffer was moved, replaced, added or removed, or has
                another shape, dtype or other strides, or the handle was closed. The error names it.
            torch.OutOfMemoryError: the device has too little memory; the module is unchanged.
            PinstageError: the current stream captures a CUDA graph.
        """
        self._target.refuse_capture()
        if self._arrivals:
            return
        moved = self._moved_outside()
        if moved:
            raise RuntimeError(
                f"{min(moved)} of {self!r} isn't held: it was moved, replaced, reshaped, added or "
                "removed outside the block, or the handle was closed. Change tensors in place, or "
                "make a new handle"
            )
        self._versions = [version_of(held.tensor) for held in self._held]
        try:
            for slab in self._slabs:
                arrival = self._target.bring_back(slab, None)
                self._arrivals.append(arrival)
                keep_until(arrival.event, slab)
        except BaseException:
            self._drop()
            raise

    def __enter__(self) -> Self:
        self._target.refuse_capture()
        if self._before is not None:
            raise RuntimeError(f"{self!r} is on the device already; leave its other block first")
        if self._arrivals and (self._moved_outside() or self._written()):
            self._drop()  # changed on the host since `onload`
        self.onload()
        for arrival in self._arrivals:
            self._target.take(arrival)
        self._outcome = NOTHING  # if this call is interrupted
        self._before = Registered(self._module)
        with torch.inference_mode(False):  # the module's tensors may be used elsewhere, too
            for held in self._held:
                storage, host = self._arrivals[held.slab].there.untyped_storage(), held.host
                held.tensor.data = view_of(
                    storage, held.begin, host.dtype, host.shape, host.stride()
                )
        self._outcome = None
        return self

    def offload(self) -> None:
        """Return the module's tensors to the host, and free the device memory behind the current
        stream's work.

        If the module has buffers, blocks until the current stream's work is done and the buffers
        are copied back: all of them up to 64 MiB, and beyond that the buffers of each submodule in
        which torch has counted a change.

        Raises:
            RuntimeError: inside the block, a parameter was changed, a buffer was replaced by one of
                another shape or dtype, or a tensor was added or removed. The error names one. The
                module is as before the block, its buffers included.
            PinstageError: the current stream captures a CUDA graph. The module stays on the device
                until `offload` is called behind the capture.
        """
        self._target.refuse_capture()
        if self._before is None:
            self._drop()
            return
        if self._outcome is None:
            self._outcome = self._decide()
        lost = self._outcome.lost
        if lost:
            self._before.restore()
        else:
            self._keep_changes(self._outcome)
        for held in self._held:
            held.tensor.data = held.host
        self._before = None
        self._arrivals.clear()
        if lost:
            raise RuntimeError(
                f"{min(lost)} of {self!r} changed inside the block: {len(lost)} in all; every "
                "change is dropped. Change parameters in place outside the block, where they are "
                "on the host; replace buffers by tensors of the same shape and dtype, or change "
                "them in place; train a module without frozen_module"
            )

    def close(self) -> None:
        """Return the module to the host for good. May be called again.

        The slabs return to the pool when the module's tensors are freed or moved, for example by
        ``module.to("cuda")``.
        """
        self.offload()
        for key in self._keys:
            _holders.pop(key, None)
        self._tensors, self._held, self._slabs = {}, [], []

    # -- changes

    def _written(self) -> list[Held]:
        """Return the tensors of which torch has counted a change since `onload`."""
        versions = zip(self._held, self._versions, strict=True)
        return [held for held, version in versions if version_of(held.tensor) != version]

    def _moved(self, now: dict[str, torch.Tensor], memory: list[torch.Tensor]) -> list[Held]:
        """Return the tensors that were replaced, or have other memory than the slabs or than the
        slabs' copies.
        """
        return [held for held in self._held if not held.is_unmoved(now, memory[held.slab])]

    def _moved_outside(self) -> set[str]:
        """Return the names of tensors that aren't held, or aren't in their slab as they were."""
        now = _tensors_of(self._module)
        added = now.keys() - self._tensors.keys()
        return added | {held.name for held in self._moved(now, self._slabs)}

    def _decide(self) -> Outcome:
        """Decide about the end of the block. Waits for the values of buffers that were replaced."""
        now = _tensors_of(self._module)
        written = self._written()
        moved = self._moved(now, [arrival.there for arrival in self._arrivals])
        lost = now.keys() - self._tensors.keys()
        lost |= {held.name for held in written if held.is_parameter}
        lost |= {held.name for held in moved if not held.can_keep_values(now)}
        lost |= {held.name for held in moved} & self._overlapping
        if lost:
            return Outcome(lost, [], {})
        values = [(held, now[held.paths[0]].detach().to("cpu", copy=True)) for held in moved]
        return Outcome(lost, values, self._copies([*written, *moved]))

    def _copies(self, changed: list[Held]) -> dict[int, tuple[int, int]]:
        """Return the bytes to copy back: those of all buffers, or of submodules that may have
        changed theirs.
        """
        buffers = [held for held in self._held if not held.is_parameter]
        ranges = _ranges(buffers)
        if sum(end - begin for begin, end in ranges.values()) <= COPIED_BACK_BYTES:
            return ranges
        owners = set().union(*(held.owners for held in changed))
        return _ranges([held for held in buffers if not owners.isdisjoint(held.owners)])

    def _keep_changes(self, outcome: Outcome) -> None:
        """Write the values of buffers to the slabs, and make the held tensors the module's
        again.
        """
        copies = []
        for slab, (begin, end) in outcome.copies.items():
            here, there = self._slabs[slab].data_ptr() + begin, self._arrivals[slab].there
            copies.append(HostCopy(here, there, begin, end - begin))
        event = self._target.to_host(copies) if copies else None
        if event is not None:
            event.synchronize()
        for held, value in outcome.values:
            held.host.copy_(value)
        if outcome.values:
            for entry in entries_of(self._module):
                entry.tensors[entry.name] = self._tensors[entry.path]

    def _drop(self) -> None:
        """Free the device memory of copies that no block has used."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            drop_arrival(self._target, arrival)

    def __del__(self) -> None:
        for arrival in self._arrivals:
            keep_until(arrival.event, arrival.there)

    def __repr__(self) -> str:
        return f"<{type(self._module).__name__} in frozen_module, to {self._target.device}>"


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by path; a tied tensor has several."""
    return {entry.path: entry.tensor for entry in entries_of(module)}


def _ranges(tensors: list[Held]) -> dict[int, tuple[int, int]]:
    """Return, for each slab, where the first of these tensors begins and the last one ends."""
    ranges: dict[int, tuple[int, int]] = {}
    for held in tensors:
        begin, end = ranges.get(held.slab, (held.begin, 0))
        ranges[held.slab] = min(begin, held.begin), max(end, held.begin + held.span)
    return ranges


def _check(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is trained, has no plain memory or no content, or is held already."""
    if tensor.requires_grad:
        why = "requires grad; call module.requires_grad_(False), or leave the module on the device"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not has_plain_memory(tensor):
        why = (
            f"has no plain memory: {type(tensor).__name__}, {tensor.layout}; leave the module on "
            "the device"
        )
    elif tensor.is_meta or tensor.is_inference():
        why = (
            "is on meta, or was made in inference mode; load the module's weights first, outside "
            "inference mode"
        )
    elif holder := _holders.get(id(tensor)) or _holders.get(tensor.untyped_storage().data_ptr()):
        why = f"is held already: {holder!r}; close that handle first"
    else:
        return
    raise ValueError(f"frozen_module can't hold {path}: it {why}")


@dataclass
class UsedPart:
    """The part of a storage that tensors use."""

    begin: int
    end: int = 0
    kind: str = ""
    """The dtype of its buffers; empty for parameters alone."""
    slab: int = 0
    start: int = 0
    """Offset in the slab."""
    paths: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    """The paths of each tensor."""


def _used_parts(tensors: dict[str, torch.Tensor]) -> list[UsedPart]:
    parts: dict[int, UsedPart] = {}
    for path, tensor in tensors.items():
        begin, end = range_of(tensor)
        begin = begin // ALIGNMENT * ALIGNMENT
        part = parts.setdefault(tensor.untyped_storage().data_ptr(), UsedPart(begin))
        part.begin, part.end = min(part.begin, begin), max(part.end, end)
        if not isinstance(tensor, torch.nn.Parameter):
            part.kind = max(part.kind, str(tensor.dtype))
        part.paths.setdefault(tensor, []).append(path)
    return list(parts.values())


def _arrange(parts: list[UsedPart]) -> list[int]:
    """Give each part its offset in a slab; return the sizes of the slabs.

    Parameters share slabs, and so do the buffers of one dtype: `torch.compile` refuses changes of
    tensors that share a storage with tensors of other dtypes.
    """
    sizes: list[int] = []
    kind = None
    for part in sorted(parts, key=lambda part: part.kind):
        nbytes = max(ALIGNMENT, round_up(part.end - part.begin, ALIGNMENT))
        if part.kind != kind or sizes[-1] + nbytes > SLAB_BYTES:
            sizes.append(0)
        kind = part.kind
        part.slab, part.start = len(sizes) - 1, sizes[-1]
        sizes[-1] += nbytes
    return sizes


def _acquire(sizes: list[int], pool: SlabPool) -> list[torch.Tensor]:
    """Return slabs, uint8 ``[n]``. Each is returned to the pool when its views are freed."""
    try:
        leases = HostSlabs(pool, OWNER, ACQUIRE_SECONDS, most=SLAB_BYTES).lease_all(sizes)
    except BudgetExceededError as error:
        raise BudgetExceededError(
            f"the module doesn't fit the pool: {error}", **vars(error)
        ) from None
    assert leases is not None
    slabs = []
    for lease in leases:
        slabs.append(torch.from_numpy(lease.numpy()))
        hold_for_good(lease)
        lease.release()  # the view keeps the slab
    return slabs


def _move(part: UsedPart, slab: torch.Tensor) -> list[Held]:
    """Move a part of a storage to its slab, uint8 ``[n]``; return the tensors that use it.

    Its copy is a storage of its own, or `torch.save` would refuse tensors of other dtypes beside
    it.
    """
    nbytes = part.end - part.begin
    copy = tensor_over(slab.numpy(), torch.uint8, (nbytes,), offset=part.start)
    storage = next(iter(part.paths)).untyped_storage()
    copy.copy_(bytes_of(storage, part.begin, part.end))
    held = []
    for tensor, paths in part.paths.items():
        begin = int(tensor.storage_offset()) * tensor.itemsize - part.begin
        host = view_of(copy.untyped_storage(), begin, tensor.dtype, tensor.shape, tensor.stride())
        tensor.data = host  # at once, so that its old memory can be freed
        held.append(Held(tensor, paths, part.slab, part.start + begin, host))
    return held


def frozen_module(
    module: torch.nn.Module, pool: SlabPool, *, device: torch.device | str | int | None = None
) -> Offloaded:
    """Keep a module that isn't trained on the host, and copy it to the device for the duration of a
    block.

    ```python
    encoder = ps.offload.frozen_module(pipeline.text_encoder, pool)
    transformer = ps.offload.frozen_module(pipeline.transformer, pool)

    encoder.onload()
    with encoder:
        transformer.onload()  # copied while the encoder computes
        embeddings = pipeline.text_encoder(tokens)
    with transformer:
        ...
    ```

    Parameters and buffers are copied to slabs of the pool once. Outside the block they are views of
    the slabs, in the same `Parameter` objects, so ``state_dict()`` works, and in-place changes are
    kept. The block makes them views of device memory, by a few large copies behind the current
    stream's work. The end of the block frees that memory, also behind the current stream's work;
    the next block copies from the slabs again. Views that you keep of slabs or of device memory
    stay valid, and keep the memory.

    The end of the block copies buffers back, and waits for the block's work to do so; without
    buffers it doesn't block. Values of buffers are kept, also if a buffer was replaced by a tensor
    of the same shape and dtype. A parameter that was changed in the block is an error, and so is a
    tensor of another shape or dtype: the module is as before the block then, its buffers included.
    A change through ``parameter.data`` isn't seen, and is lost. Change weights outside the block.

    Hooks, tied weights and modules compiled by `torch.compile` work. Plain tensor attributes stay
    where they are, as with ``module.to``. Run backward through the module, for inputs that require
    grad, inside the block.

    Args:
        module: a module on any device. No parameter may require grad, or be held by another handle.
        pool: source of the slabs, which have at most 256 MiB each, or more for a larger tensor.
            They are held for good: until the handle is closed and the tensors are freed. Copies
            from page-locked memory have the bandwidth of the bus. Where page-locking is refused,
            slabs are pageable, and a `StagingWarning` says so once.
        device: the block's device. None is the current CUDA device, or the CPU if CUDA isn't
            available.

    Returns:
        The handle: ``with handle:``, ``onload()`` to start the copy early, ``stats()``,
        ``close()``. Don't use it in several threads at once.

    Raises:
        TypeError: `module` isn't a module, or `pool` isn't a `SlabPool`.
        ValueError: a parameter or buffer requires grad, has no plain memory, or is held already;
            the error names it.
        PinstageError: the current stream captures a CUDA graph. A block is refused then, too.
        BudgetExceededError: the module is larger than the pool's cap, or than the part that other
            modules leave. The module is as before, as after every error.
        AcquireTimeoutError: no room became free within 60 seconds.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module: {module!r}")
    check_pool(pool)
    target = shared_targets.of(target_for(device).device)
    target.refuse_capture()
    return FrozenModule(module, pool, target)
