"""Batches that arrived, sent to the device."""

from __future__ import annotations

import torch

from .._staging import Target, Transfer, copy_event_of, send_packed
from ._arrivals import Arrival
from ._stats import Counters


class Sender:
    """Starts the copies of batches that arrived, and gives their slabs back behind these. Any thread may.

    Args:
        target: where to.
        counters: of the loader.
    """

    def __init__(self, target: Target, counters: Counters) -> None:
        self._target = target
        self._counters = counters

    def send(self, arrival: Arrival) -> Transfer:
        """Send a batch. Does not block."""
        number = arrival.number
        if number is not None:
            event = None
            try:
                transfer = self._send_from(arrival.receiver.address_of(number), arrival)
                event = copy_event_of(transfer)
            except BaseException:
                event = self._target.record_copies()
                raise
            finally:
                arrival.receiver.sent(number, event)
        else:
            host = None if arrival.raw is None else torch.frombuffer(arrival.raw, dtype=torch.uint8).data_ptr()
            transfer = self._send_from(host, arrival)
        self._counters.count(transfer, fallback=arrival.raw is not None, slot_wait_seconds=arrival.waited)
        return transfer

    def _send_from(self, host: int | None, arrival: Arrival) -> Transfer:
        return send_packed(self._target, arrival.structure, arrival.table, host, arrival.others)
