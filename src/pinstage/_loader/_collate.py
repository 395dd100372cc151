"""Collate functions: of workers, which also pack the batch into a slab, and without workers.

Default collation is put off until there is a slab, and samples are stacked right into it.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import get_ident
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.data

from .. import _native
from .._batch import Keeping, Stack, pack, take_apart
from .._compat.loader import collation
from ._messages import STRUCTURES_KEPT, BatchMessage
from ._worker import WorkerSlabs

INLINE_STACK_BYTES = 64 * 1024
"""Without workers, torch stacks batches all of whose stacks are smaller: putting these off takes
longer than it saves. 120 stacks of 4 KiB took 15% longer.
"""

_pickled_structure = lru_cache(STRUCTURES_KEPT)(pickle.dumps)


@dataclass(eq=False)
class SlabCollate:
    """Collates by the loader's own function, and packs the result into a slab.

    Called in workers only. It is sent there with the process object, whatever the start method.

    Args:
        collate: the loader's collate function.
        token: the token of the broker in the main process.
        channels: the channels to the broker, one for each worker.
        main_pid: the id of the main process.
        limit: the number of slabs that each worker may have.
        keeping: says which leaves stay on the host. None if none does.
    """

    collate: Callable[[Any], Any]
    token: int
    channels: Sequence[Connection]
    main_pid: int
    limit: int
    keeping: Keeping | None = None
    _worker: int = field(default=-1, init=False)
    _slabs: WorkerSlabs | None = field(default=None, init=False)
    _told: ClassVar[Any] = None

    @classmethod
    def tell(cls, batch: Any) -> None:
        """Tell of the next batch of this worker; None if it is one of samples. See `InMemory`."""
        cls._told = batch

    def __call__(self, samples: Any) -> BatchMessage:
        """Return a small message that stands for the batch.

        Raises:
            LayoutError: the batch holds an object that cannot be staged.
            ShutDownError: the iterator is being shut down.
            Exception: the collate function failed, or an unpacked leaf can't be pickled.
        """
        slabs = self._slabs if self._slabs is not None else self._begin()
        slabs.waited_seconds = 0.0
        told, SlabCollate._told = self._told, None
        batch = collated(self.collate, self.keeping, samples) if told is None else told
        parts = take_apart(batch, keeping=self.keeping)
        others = parts.others()
        # Here, since the queue's thread would only print an error of pickling, and the main process
        # would wait forever.
        pickled = bytes(ForkingPickler.dumps(others)) if others else None
        nbytes = parts.table.nbytes
        slab = slabs.take(nbytes) if nbytes else None
        raw = bytearray(nbytes) if nbytes and slab is None else None
        try:
            if slab is not None:
                pack(parts, slab.tensor)
            elif raw is not None:
                pack(parts, torch.frombuffer(raw, dtype=torch.uint8))
            structure = _pickled_structure(parts.structure)
        except BaseException:
            if slab is not None:
                slab.is_free = True
            raise
        number = None if slab is None else slab.number
        return BatchMessage(
            self.token,
            self._worker,
            number,
            structure,
            parts.table.data,
            pickled,
            raw,
            slabs.waited_seconds,
        )

    def _begin(self) -> WorkerSlabs:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "workers only"
        self._worker = info.id
        for worker, channel in enumerate(self.channels):
            if worker != info.id:
                channel.close()
        collate = collation()
        if collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn:
            # Also for a collate_fn that calls torch's.
            collate.default_collate_fn_map[torch.Tensor] = stack_privately
        self._slabs = WorkerSlabs(self.channels[info.id], self.main_pid, self.limit)
        return self._slabs


@dataclass(eq=False)
class InlineCollate:
    """Collates without workers: by the loader's own function. Stacking is put off if only
    `LoaderIterator` gets the batch.

    Args:
        collate: the loader's collate function.
        keeping: says which leaves stay on the host. None if none does.
    """

    collate: Callable[[Any], Any]
    keeping: Keeping | None
    is_unseen: bool = field(default=False, init=False)
    """Whether torch's iterator passes on batches with stacks. See `returns_unseen`."""
    _told: dict[int, Any] = field(default_factory=dict, init=False)

    def tell(self, batch: Any) -> None:
        """Tell of this thread's next batch; None if it is one of samples. See `InMemory`."""
        self._told[get_ident()] = batch

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        if (told := self._told.pop(get_ident(), None)) is not None:
            return told
        if not self.is_unseen:
            return self.collate(samples)
        return collated(self.collate, self.keeping, samples, inline=True)


# -- default collation -----------------------------------------------------------------------------


def collated(
    collate: Callable[[Any], Any], keeping: Keeping | None, samples: Any, *, inline: bool = False
) -> Any:
    """Collate samples; put off default collation's stacking if no code of the user's sees the
    batch.

    Args:
        collate: the loader's collate function.
        keeping: see `SlabCollate`.
        samples: of a batch.
        inline: whether there are no workers. Then torch stacks small batches now, and samples with
            other strides than new tensors, for whose stack it may choose other strides, too.
    """
    shows_leaves = keeping is not None and keeping.says is not None
    if shows_leaves or collate is not torch.utils.data.default_collate:
        return collate(samples)
    return collate_lazily(samples, inline=inline)


def collate_lazily(samples: Any, *, inline: bool) -> Any:
    """Do what torch's ``default_collate`` does, but put a `Stack` in the place of each tensor.

    If the user's code would see it, torch's own function runs instead. `inline`: see `collated`.
    """
    collate = collation()
    sizes: list[int] = []
    puts_off = collates_as_shipped(collate) and _add_sizes(samples[0], sizes)
    if inline and puts_off:
        puts_off = max(sizes, default=0) * len(samples) >= INLINE_STACK_BYTES
    if not puts_off:
        return torch.utils.data.default_collate(samples)

    def collate_tensors(batch: Any, **_: Any) -> Any:
        stack = alike(batch, usual=inline)
        # Torch handles other samples, or raises its own error.
        return collate.collate_tensor_fn(batch) if stack is None else stack

    collate_fn_map = collate.default_collate_fn_map | {torch.Tensor: collate_tensors}
    return collate.collate(samples, collate_fn_map=collate_fn_map)


def collates_as_shipped(collate: Any) -> bool:
    """Return whether the functions of default collation are torch's own, or are known to read no
    values.
    """
    functions = collate.default_collate_fn_map
    if functions.get(torch.Tensor) not in (collate.collate_tensor_fn, stack_privately):
        return False
    modules = {getattr(function, "__module__", None) for function in functions.values()}
    # tensordict's stacks TensorDicts, as torch does.
    return modules <= {collate.__name__, __name__, "tensordict.tensorclass"}


def _add_sizes(sample: Any, sizes: list[int]) -> bool:
    """Add the bytes of a sample's tensors and arrays; return whether all its containers are
    Python's own. Other classes may look at inserted items.
    """
    kind = type(sample)
    if kind is torch.Tensor:
        sizes.append(sample.numel() * sample.element_size())
        return True
    if kind is np.ndarray:
        sizes.append(sample.nbytes)
        return True
    if kind in (dict, OrderedDict, defaultdict):
        return all(_add_sizes(item, sizes) for item in sample.values())
    # A subclass may have its own __new__.
    is_namedtuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    if kind in (list, tuple) or is_namedtuple:
        return all(_add_sizes(item, sizes) for item in sample)
    return isinstance(sample, str | bytes) or not isinstance(sample, Mapping | Sequence)


def alike(samples: Any, *, usual: bool) -> Stack | None:
    """Return the stack of samples; None if torch has to stack them.

    Other sequences than lists and tuples may make a sample each time that it is read, so that its
    memory is freed before it is stacked. `usual`: whether new tensors' strides are required.
    """
    return _native.core.alike(samples, usual) if type(samples) in (list, tuple) else None


def stack_privately(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack as torch does in the main process. In a worker, torch would needlessly stack into
    /dev/shm.
    """
    if alike(batch, usual=False) is not None:
        # Into memory with the usual strides, as torch does in workers. Without `out`, some would be
        # channels-last.
        return torch.stack(batch, 0, out=batch[0].new_empty((len(batch), *batch[0].shape)))
    return collation().collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
