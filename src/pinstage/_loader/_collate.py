"""What workers run in place of the collate function: it collates, and packs the batch into a slab."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.utils.data

from .._batch import Keeping, Parts, Structure, Table, take_apart
from .._compat.loader import collation
from ._messages import Message
from ._stacking import Stacks, collate_lazily, pack_and_stack, stack_privately
from ._worker import WorkerSlabs

LOOKS_KNOWN = 64
"""How many structures of batches a worker and the main process know by number, each with its last offset table. A batch
of a known structure sends its table only where that has changed; any other batch sends both."""


class SlabCollate:
    """Collates by the loader's own function, and packs the result into a slab.

    Is called in workers only. Travels there with the process object, whatever the start method.

    Args:
        collate: the loader's collate function.
        token: of the broker in the main process.
        channels: to the broker, one for each worker.
        main_pid: the main process.
        limit: how many slabs each worker may have.
        keeping: says which leaves stay on the host. None if none does.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        token: int,
        channels: list[Connection],
        main_pid: int,
        limit: int,
        keeping: Keeping | None = None,
    ) -> None:
        self._collate = collate
        self._token = token
        self._channels = channels
        self._main_pid = main_pid
        self._limit = limit
        self._keeping = keeping
        self._worker = -1
        self._slabs: WorkerSlabs | None = None
        self._known: dict[Structure, tuple[int, Table]] = {}

    def __call__(self, samples: Any) -> Message:
        """Return a small message that stands for the batch.

        Raises:
            LayoutError: the batch holds an object that cannot be staged.
            ClosedError: the iterator is being shut down.
            Exception: of the collate function, or of pickling what is not packed.
        """
        slabs = self._slabs if self._slabs is not None else self._begin()
        slabs.waited_seconds = 0.0
        stacks: Stacks = {}
        is_looked_at = self._keeping is not None and self._keeping.says is not None
        lazily = self._collate is torch.utils.data.default_collate and not is_looked_at
        batch = collate_lazily(samples, stacks) if lazily else self._collate(samples)
        parts = take_apart(batch, keeping=self._keeping)
        others = [stack_privately(stacks[id(leaf)].samples) if id(leaf) in stacks else leaf for leaf in parts.others()]
        # Pickled here, not in the queue's thread: that would print an error, and the main process would wait forever.
        pickled = bytes(ForkingPickler.dumps(others)) if others else None
        number, structure, table = self._looks(parts)
        nbytes = parts.table.nbytes
        slab, raw = None, None
        if nbytes:
            slab = slabs.take(nbytes)
            if slab is None:
                raw = bytearray(nbytes)
                pack_and_stack(parts, stacks, torch.frombuffer(raw, dtype=torch.uint8))
            else:
                assert slab.tensor is not None
                try:
                    pack_and_stack(parts, stacks, slab.tensor)
                except BaseException:
                    slab.is_free = True
                    raise
        if table is not None:
            self._told(number, parts)
        where = None if slab is None else slab.number
        return Message(self._token, self._worker, where, number, structure, table, pickled, raw, slabs.waited_seconds)

    def _begin(self) -> WorkerSlabs:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "workers only"
        self._worker = info.id
        for worker, channel in enumerate(self._channels):
            if worker != info.id:
                channel.close()
        collate = collation()
        if collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn:
            collate.default_collate_fn_map[torch.Tensor] = stack_privately  # also for a collate_fn that calls torch's
        self._slabs = WorkerSlabs(self._channels[info.id], self._main_pid, self._limit)
        return self._slabs

    def _looks(self, parts: Parts) -> tuple[int, bytes | None, bytes | None]:
        """Return the number that stands for this structure, and the structure and table if they have to be sent."""
        key = parts.structure
        known = self._known.get(key)
        if known is not None:
            number, table = known
            return number, None, None if table == parts.table else parts.table.data
        number = len(self._known)
        if number >= LOOKS_KNOWN:
            number = next(iter(self._known.values()))[0]  # the oldest one's
        return number, pickle.dumps(parts.structure), parts.table.data

    def _told(self, number: int, parts: Parts) -> None:
        """Note what a number stands for in the main process, now that it is sent. The oldest one may make room."""
        key = parts.structure
        if key not in self._known and len(self._known) >= LOOKS_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = number, parts.table
