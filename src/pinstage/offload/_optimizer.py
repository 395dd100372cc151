"""`optimizer_state`: an optimizer's state is kept on the host between its steps."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import torch

from .._compat.views import range_of, view_of
from .._memory import refuse_capture
from .._pool import SlabPool, check_pool
from .._sizes import Size, parse_bytes
from .._stage import HostSlabs, shared_targets
from ._block import OWNER, Load, OffloadedBlock, bytes_of, can_leave, keep_until, lease_now
from ._offloaded import Offloaded, OffloadedStats


class OffloadedOptimizer(Offloaded):
    """An optimizer's state on the host between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, pool: SlabPool, min_bytes: int) -> None:
        self._slabs = HostSlabs(pool, OWNER, None)
        self._min_bytes = min_bytes
        self._optimizer = weakref.ref(optimizer)
        self._blocks: dict[torch.Tensor, OffloadedBlock] = {}  # by the placeholder
        self._stayed_at_cap_bytes = 0
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._put_in_place()),
            optimizer.register_step_post_hook(lambda *_: self.offload()),
            optimizer.register_state_dict_pre_hook(lambda _: self._put_in_place()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
        ]
        try:
            self.offload()
        except BaseException:
            self.close()
            raise

    def stats(self) -> OffloadedStats:
        blocks = self._blocks.values()
        return OffloadedStats(
            host_bytes=sum(block.nbytes for block in blocks),
            device_bytes=sum(block.nbytes for block in blocks if block.arrival is not None),
            stayed_at_cap_bytes=self._stayed_at_cap_bytes,
        )

    def onload(self) -> None:
        """Start copying the state back, behind earlier work of the current stream. Doesn't block.

        The next step would do this itself. If you call this before backward, backward hides the
        copies, but the device needs room for both.
        """
        refuse_capture()
        for block in self._blocks.values():
            if block.arrival is None:
                block.fetch()

    def _put_in_place(self) -> None:
        """Replace the placeholders by the state, for the current stream."""
        self.onload()
        for state, key, value in self._values():
            block = self._blocks.get(value)
            if block is not None:
                there = block.take().untyped_storage()
                state[key] = view_of(there, 0, value.dtype, value.shape, value.stride())
        self._blocks.clear()

    def offload(self) -> None:
        """Copy the state to the host, behind earlier work of the current stream. Doesn't block.

        The device memory is free when the copies are done. Each tensor is replaced by one on
        ``"meta"``, which has a shape but no content. Does nothing after `close`.
        """
        if not self._hooks:
            return
        refuse_capture()
        for block in self._blocks.values():  # from an `onload` that no step has used
            block.drop_arrival()
        self._stayed_at_cap_bytes = 0
        for state, key, value in self._own_values():
            leased = lease_now(self._slabs, value.nbytes)
            if leased is None:
                self._stayed_at_cap_bytes += value.nbytes
                continue
            source = bytes_of(value.untyped_storage(), 0, value.nbytes)
            block = OffloadedBlock(shared_targets.of(value.device), Load(source, 0, None), *leased)
            placeholder = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            self._blocks[placeholder] = block
            state[key] = placeholder
            keep_until(block.event, source)
            block.source = None

    def close(self) -> None:
        """Copy the state back and leave it on the device. May be called again."""
        self._put_in_place()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        self._put_in_place()
        return self

    def _loaded(self) -> None:
        """Offload the loaded state; drop the blocks of the old state."""
        self._blocks.clear()
        self.offload()

    def _values(self) -> Iterator[tuple[dict[Any, Any], Any, torch.Tensor]]:
        """Yield each tensor that the optimizer keeps for a parameter, with its dict and its key."""
        optimizer = self._optimizer()
        states = [] if optimizer is None else optimizer.state.values()
        for state in [state for state in states if isinstance(state, dict)]:
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor):
                    yield state, key, value

    def _own_values(self) -> Iterator[tuple[dict[Any, Any], Any, torch.Tensor]]:
        """Yield the values that can be offloaded: plain, large enough, and sharing no memory within
        the optimizer.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        users = _users_of_storages(optimizer)
        for state, key, value in self._values():
            if not can_leave(value, self._slabs.pool) or value.requires_grad:
                continue
            storage = value.untyped_storage()
            is_whole = range_of(value) == (0, storage.nbytes()) == (0, value.nbytes)
            is_alone = is_whole and users[storage.data_ptr()] == 1
            if is_alone and value.nbytes >= self._min_bytes:
                yield state, key, value


def _users_of_storages(optimizer: torch.optim.Optimizer) -> Counter[int]:
    """Return the number of the optimizer's tensors in each storage, by the storage's address."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    return Counter(
        tensor.untyped_storage().data_ptr()
        for tensor in _tensors_in([dict(optimizer.state), parameters, gradients])
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    )


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(part)


def optimizer_state(
    optimizer: torch.optim.Optimizer, pool: SlabPool, *, min_bytes: Size = "1MiB"
) -> Offloaded:
    """Keep an optimizer's state on the host between its steps, in slabs of a pool.

    ```python
    optimizer = torch.optim.AdamW(model.parameters())
    offloaded = ps.offload.optimizer_state(optimizer, pool)
    ```

    The state is copied to the host after each step, during the next forward, and copied back before
    the next step. In between, its device memory is free for activations. Weights are bit-equal to
    those of a run without offloading. ``state_dict`` and ``load_state_dict`` work as before. After
    ``state_dict``, the state is on the device until the next step has ended.

    Between steps, ``optimizer.state`` has tensors on ``"meta"`` instead, so that reading them
    fails. Each step has new tensors: later steps don't change a tensor of the state that you keep.
    These stay on the device: tensors of less than `min_bytes`, subclasses (``DTensor``), tensors
    that share memory or repeat elements, and tensors for which the pool has no room. Where
    page-locking is refused, slabs are pageable, and a `StagingWarning` says so once.

    Args:
        optimizer: any optimizer whose state is in ``optimizer.state[parameter]``, like all of
            torch's. It may be in the wrapper that Accelerate or Lightning gives it.
        pool: source of the slabs; as for `save_on_cpu`.
        min_bytes: smaller tensors stay: an int, or text such as ``"1MiB"``.

    Returns:
        A handle: ``onload()`` starts the copies early, ``stats()`` returns the bytes on the host
        and on the device, and ``close()`` ends the offloading.

    Raises:
        TypeError: `optimizer` is not a ``torch.optim.Optimizer``, or `pool` is not a `SlabPool`.
        ValueError: a negative size.
        PinstageError: the current stream captures a CUDA graph. The handle's methods and the
            optimizer's steps are refused then, too.
    """
    # In Accelerate's wrapper, or Lightning's.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"cannot offload the state of a {type(optimizer).__name__}: pass an optimizer of "
            "torch.optim"
        )
    check_pool(pool)
    refuse_capture()
    return OffloadedOptimizer(optimizer, pool, parse_bytes(min_bytes))
