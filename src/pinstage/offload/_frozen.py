"""`frozen_module`: keeps a module that isn't trained on the host, and on the device only inside a block.

::

    module's tensors --once--> slabs of the pool          outside the block, the module's tensors are views of them
    onload            one copy per slab, side stream  --> device memory
    with handle:      the module's tensors are views of the device memory
    end of the block  changed buffers are copied back;    the device memory is freed

Memory is copied by storage, not by tensor, so that tied weights, views and strides stay as they are.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Self

import torch

from .._compat.storages import version_of
from .._pool import SlabPool, check_pool
from .._sizes import format_bytes, round_up
from .._stage import Arrival, HostCopy, Target, shared_targets, target_for
from ..errors import BudgetExceededError
from ._block import ALIGNMENT, OWNER, bytes_of, drop_arrival, has_plain_memory, keep_until, range_of, view_of
from ._offloaded import Offloaded, OffloadedStats

SLAB_BYTES = 256 << 20
"""Tensors are gathered in slabs of at most this size; a larger tensor has a slab of its own. A copy of about 16 MiB or
more reaches the bandwidth of the bus."""

ACQUIRE_SECONDS = 60.0
"""Timeout for a slab, the same as a `Stager`'s default."""

_holders: weakref.WeakValueDictionary[int, FrozenModule] = weakref.WeakValueDictionary()
"""The handles that hold tensors, by the tensor's id, and by its storage's address on the host."""


class Held(NamedTuple):
    """A parameter or buffer, and its place in a slab."""

    owner: str
    """Path of the submodule."""
    path: str
    tensor: torch.Tensor
    """The module's own object."""
    slab: int
    begin: int
    """Byte offset in the slab, and in its copy on the device."""
    host: torch.Tensor
    """View of the slab: the tensor's content outside the ``with`` block."""

    def is_at(self, memory: torch.Tensor) -> bool:
        """Return whether the tensor's memory is its place in a slab, or in a slab's copy."""
        return not self.tensor.numel() or self.tensor.data_ptr() == memory.data_ptr() + self.begin


class FrozenModule(Offloaded):
    """A module that is on the host, except inside its block."""

    def __init__(self, module: torch.nn.Module, pool: SlabPool, target: Target) -> None:
        self._module = module
        self._target = target
        self._arrivals: list[Arrival] = []
        self._versions: list[int] = []
        self._inside = False
        tensors = _tensors_of(module)
        for path, tensor in tensors.items():
            _check(path, tensor)
        with torch.inference_mode(False):
            self._slabs, self._held = _move_to_slabs(tensors, pool)
        self._keys = {id(held.tensor) for held in self._held}
        self._keys |= {held.host.untyped_storage().data_ptr() for held in self._held if held.host.numel()}
        _holders.update(dict.fromkeys(self._keys, self))

    def stats(self) -> OffloadedStats:
        """Return the bytes on the host and on the device. Doesn't block."""
        device_bytes = sum(arrival.there.numel() for arrival in self._arrivals)
        return OffloadedStats(host_bytes=sum(slab.numel() for slab in self._slabs), device_bytes=device_bytes)

    def onload(self) -> None:
        """Start copying to the device, behind earlier work of the current stream. Doesn't block.

        The module's tensors stay on the host until the block is entered. To overlap the copy with other work, call this
        before you enqueue that work.

        Raises:
            RuntimeError: a parameter or buffer was moved, replaced, added or removed, or the handle was closed.
            torch.OutOfMemoryError: the device has too little memory; the module is unchanged.
        """
        if self._arrivals:
            return
        now, then = _tensors_of(self._module), {held.path: held.tensor for held in self._held}
        moved = {path for path in now.keys() | then.keys() if now.get(path) is not then.get(path)}
        moved.update(held.path for held in self._held if not held.is_at(self._slabs[held.slab]))
        if moved:
            raise RuntimeError(
                f"{min(moved)} of {self!r} isn't held: it was moved, replaced, added or removed outside the block, or "
                "the handle was closed. Change tensors in place, or make a new handle"
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
        if self._inside:
            raise RuntimeError(f"{self!r} is on the device already; leave its other block first")
        if self._arrivals and self._versions != [version_of(held.tensor) for held in self._held]:
            self._drop()  # changed on the host since `onload`
        self.onload()
        for arrival in self._arrivals:
            self._target.take(arrival)
        self._inside = True
        with torch.inference_mode(False):  # the module's tensors may be used elsewhere, too
            for held in self._held:
                storage = self._arrivals[held.slab].there.untyped_storage()
                held.tensor.data = view_of(storage, held.begin, held.host.dtype, held.host.shape, held.host.stride())
        return self

    def offload(self) -> None:
        """Return the module's tensors to the host, and free the device memory behind the current stream's work.

        Blocks only if buffers have changed, until they are copied back. If the version of one buffer has changed, all
        buffers of its submodule are copied: kernels of batch norm change the version of the batch count, but not those
        of the statistics.

        Raises:
            RuntimeError: a parameter was changed, or a tensor was moved, inside the block; the change is dropped.
        """
        if not self._inside:
            self._drop()
            return
        lost, changed = [], set()
        for held, version in zip(self._held, self._versions, strict=True):
            is_there = held.is_at(self._arrivals[held.slab].there)
            if (is_there and version_of(held.tensor) == version) or held.is_at(self._slabs[held.slab]):
                continue  # unchanged, or returned already by a call that was interrupted
            if is_there and not _is_parameter(held.tensor):
                changed.add(held.owner)
            else:
                lost.append(held.path)
        buffers = [held for held in self._held if held.owner in changed and not _is_parameter(held.tensor)]
        for event in [self._copy_back(held) for held in buffers]:
            if event is not None:
                event.synchronize()
        for held in self._held:
            held.tensor.data = held.host
        self._inside = False
        self._arrivals.clear()
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} of {self!r} changed inside the block; the change is dropped. Change parameters in "
                "place outside the block, where they are on the host; train a module without frozen_module"
            )

    def close(self) -> None:
        """Return the module to the host for good. May be called again.

        The slabs return to the pool when the module's tensors are freed or moved, for example by ``module.to("cuda")``.
        """
        self.offload()
        for key in self._keys:
            _holders.pop(key, None)
        self._held, self._slabs = [], []

    def _copy_back(self, held: Held) -> Any:
        """Copy a buffer to its slab; return the event, or None if the copy is done."""
        first, last = range_of(held.host) if held.host.numel() else (0, 0)
        part = slice(held.begin, held.begin + last - first)
        copy = HostCopy(self._arrivals[held.slab].there[part], self._slabs[held.slab][part], owned=False)
        return self._target.to_host([copy], hold=False)

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


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by path, each object once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is trained, has no plain memory or no content, or is held already."""
    if tensor.requires_grad:
        why = "requires grad; call module.requires_grad_(False), or leave the module on the device"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not has_plain_memory(tensor):
        why = f"has no plain memory: {type(tensor).__name__}, {tensor.layout}; leave the module on the device"
    elif tensor.is_meta or tensor.is_inference():
        why = "is on meta, or was made in inference mode; load the module's weights first, outside inference mode"
    elif (key := id(tensor)) in _holders or (key := tensor.untyped_storage().data_ptr()) in _holders:
        why = f"is held already: {_holders[key]!r}; close that handle first"
    else:
        return
    raise ValueError(f"frozen_module can't hold {path}: it {why}")


def _move_to_slabs(tensors: dict[str, torch.Tensor], pool: SlabPool) -> tuple[list[torch.Tensor], list[Held]]:
    """Move the memory of tensors to slabs, by storage; return the slabs, uint8 ``[n]``, and the places there.

    Parameters share slabs, and so do the buffers of one dtype: `torch.compile` refuses changes of tensors that share a
    storage with tensors of other dtypes.
    """
    ranges: dict[int, tuple[int, int]] = {}  # by the storage's address: the bytes that tensors use
    kinds: dict[int, str] = {}  # by the storage's address: dtype of buffers, empty for parameters
    for tensor in tensors.values():
        begin, end = range_of(tensor) if tensor.numel() else (0, 0)
        address = tensor.untyped_storage().data_ptr()
        least, most = ranges.get(address, (begin, end))
        ranges[address] = min(least, begin // ALIGNMENT * ALIGNMENT), max(most, end)
        kinds[address] = max(kinds.get(address, ""), "" if _is_parameter(tensor) else str(tensor.dtype))
    sizes: list[int] = []  # of slabs
    places: dict[int, tuple[int, int]] = {}  # by the storage's address: slab, and offset there
    last = ""
    for address in sorted(ranges, key=kinds.__getitem__):
        begin, end = ranges[address]
        nbytes = max(ALIGNMENT, round_up(end - begin, ALIGNMENT))
        if not sizes or sizes[-1] + nbytes > SLAB_BYTES or kinds[address] != last:
            sizes.append(0)
            last = kinds[address]
        places[address] = len(sizes) - 1, sizes[-1]
        sizes[-1] += nbytes
    if sum(sizes) > pool.max_bytes:
        raise BudgetExceededError(
            f"the module doesn't fit the pool: {format_bytes(sum(sizes))} of max_bytes {format_bytes(pool.max_bytes)}; "
            "pass a larger max_bytes to SlabPool",
            requested_bytes=sum(sizes),
            max_bytes=pool.max_bytes,
        )
    slabs = []
    for nbytes in sizes:
        lease = pool.acquire(nbytes, timeout=ACQUIRE_SECONDS, owner=OWNER)
        slabs.append(torch.from_numpy(lease.numpy()))
        lease.release()  # the view keeps the slab
    storages: dict[int, torch.UntypedStorage] = {}  # on the host: one each, or torch.save refuses mixed dtypes
    held = []
    for path, tensor in tensors.items():
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        (begin, end), (slab, start) = ranges[storage.data_ptr()], places[storage.data_ptr()]
        if storage.data_ptr() not in storages:
            own = slabs[slab][start : start + end - begin]
            own = torch.frombuffer(own.numpy(), dtype=torch.uint8) if end > begin else torch.empty_like(own)
            own.copy_(bytes_of(storage, begin, end))
            storages[storage.data_ptr()] = own.untyped_storage()
        host = view_of(storages[storage.data_ptr()], offset - begin, tensor.dtype, tensor.shape, tensor.stride())
        tensor.data = host  # at once, so that its old memory can be freed
        held.append(Held(path.rpartition(".")[0], path, tensor, slab, start + offset - begin, host))
    return slabs, held


def frozen_module(
    module: torch.nn.Module, pool: SlabPool, *, device: torch.device | str | int | None = None
) -> Offloaded:
    """Keep a module that isn't trained on the host, and copy it to the device for the duration of a block.

    ::

        encoder = ps.offload.frozen_module(pipeline.text_encoder, pool)
        transformer = ps.offload.frozen_module(pipeline.transformer, pool)

        encoder.onload()
        with encoder:
            transformer.onload()  # copied while the encoder computes
            embeddings = pipeline.text_encoder(tokens)
        with transformer:
            ...

    Parameters and buffers are copied to slabs of the pool once. Outside the block they are views of the slabs, in the
    same `Parameter` objects, so ``state_dict()`` works, and in-place changes are kept. The block makes them views of
    device memory, by a few large copies behind the current stream's work. The end of the block frees that memory, also
    behind the current stream's work; the next block copies from the slabs again. Views that you keep of slabs or of
    device memory stay valid, and keep the memory.

    The end of the block copies changed buffers back. A parameter that was changed in the block is an error, unless the
    change went through ``.data``, which torch doesn't count: then it is lost. Change weights outside the block. Hooks,
    tied weights and modules compiled by `torch.compile` work. Plain tensor attributes stay where they are, as with
    ``module.to``. Run backward through the module, for inputs that require grad, inside the block.

    Args:
        module: a module on any device. No parameter may require grad, or be held by another handle.
        pool: source of the slabs, which have at most 256 MiB each, or more for a larger tensor. They are in use as long
            as the tensors live. Copies from a pool over page-locked memory have the bandwidth of the bus.
        device: the block's device. None is the current CUDA device, or the CPU if CUDA isn't available.

    Returns:
        The handle: ``with handle:``, ``onload()`` to start the copy early, ``stats()``, ``close()``. Don't use it in
        several threads at once.

    Raises:
        TypeError: `module` isn't a module, or `pool` isn't a `SlabPool`.
        ValueError: a parameter or buffer requires grad, has no plain memory, or is held already; the error names it.
        BudgetExceededError, AcquireTimeoutError: the pool has no room. The module is as before, as after every error.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module: {module!r}")
    check_pool(pool)
    return FrozenModule(module, pool, shared_targets.of(target_for(device).device))
