"""What comes out of the worker queue in the main process."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn, Protocol

from .._layout import Table
from .._tree import Structure


class Known:
    """What batches of one number look like.

    Args:
        structure: pickled, until it could be unpickled.
        table: the last one.
    """

    __slots__ = ("structure", "table")

    def __init__(self, structure: bytes | Structure, table: bytes) -> None:
        self.structure = structure
        self.table = Table.of_bytes(table)


class Receiver(Protocol):
    """Whose messages they are: the `SlabServer`."""

    known: dict[tuple[int, int], Known]
    """What the numbers of batches mean, for each worker."""

    def arrived(self, number: int, arrival: Arrival | None) -> None:
        """Take note that a slab holds a batch that arrived; None: one that was lost on the way."""
        ...


RECEIVERS: dict[int, Receiver] = {}
"""The receivers of this process, by the number that their workers' messages carry, until their end."""


class Message:
    """A batch as a worker sends it. What comes out at the other end is an `Arrival`.

    That happens in unpickling, in whatever part of torch's loader reads the queue: so also a batch that torch drops
    there (a reset of persistent workers) gives its slab back, and no definition of a layout is missed.
    """

    __slots__ = ("contents",)

    def __init__(self, *contents: Any) -> None:
        self.contents = contents

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, self.contents


class Arrival:
    """A packed batch in the main process. When one dies that was not sent, its slab is free again."""

    __slots__ = ("__weakref__", "number", "others", "raw", "receiver", "structure", "table", "waited")

    def __init__(
        self,
        receiver: Any,
        structure: Structure,
        table: Table,
        number: int | None,
        raw: bytearray | None,
        others: list[Any],
        waited: float,
    ) -> None:
        self.receiver = receiver
        self.structure = structure
        self.table = table
        self.number = number
        """Of the slab; None if the bytes are in `raw`, or there are none."""
        self.raw = raw
        self.others = others
        self.waited = waited
        if number is not None:
            receiver.arrived(number, self)


class Failed:
    """In place of a batch that could not be unpickled, or sent: an error in the queue would end torch's loop."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def reraise(self) -> NoReturn:
        """Raise the error, once."""
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # or its traceback and this frame would keep one another


def arrive(
    token: int,
    worker: int,
    slab: int | None,
    number: int,
    structure: bytes | None,
    table: bytes | None,
    pickled: bytes | None,
    raw: bytearray | None,
    waited: float,
) -> Arrival | Failed | None:
    """Turn a message into an arrival.

    Args:
        token: whose message it is.
        worker: who sent it.
        slab: where the bytes are; None if they are in `raw`, or there are none.
        number: of batches that look like this one, for this worker.
        structure: of the batch, for which the number stands from now on; None if it does already.
        table: its offset table; None if it is that of the last batch of this number.
        pickled: the leaves that do not live in the slab.
        raw: the bytes of a batch for which there was no slab.
        waited: seconds that the worker waited for slabs.
    """
    receiver = RECEIVERS.get(token)
    if receiver is None:  # it ended meanwhile
        return None
    try:
        if structure is not None:
            assert table is not None
            receiver.known[worker, number] = Known(structure, table)  # also if it cannot be unpickled now
        known = receiver.known[worker, number]
        if structure is None and table is not None:
            known.table = Table.of_bytes(table)
        found = known.structure
        if isinstance(found, bytes):
            found = known.structure = pickle.loads(found)
        others = pickle.loads(pickled) if pickled is not None else []
    except BaseException as error:
        if slab is not None:
            receiver.arrived(slab, None)
        if isinstance(error, Exception) and not isinstance(error, OSError):  # of which torch knows what to say
            return Failed(error)
        raise
    return Arrival(receiver, found, known.table, slab, raw, others, waited)
