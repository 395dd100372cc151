"""What comes out of the worker queue in the main process."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .._layout import Layout, load_structure, with_leaves

if TYPE_CHECKING:
    import torch


class Receiver(Protocol):
    """Whose messages they are: the `SlabServer`."""

    structures: dict[tuple[int, int | None], Layout | bytes]
    """What structure numbers mean, for each worker; pickled as long as it could not be unpickled."""

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

    __slots__ = ("__weakref__", "layout", "number", "others", "raw", "receiver", "waited")

    def __init__(
        self,
        receiver: Any,
        layout: Layout,
        number: int | None,
        raw: bytearray | None,
        others: list[torch.Tensor],
        waited: float,
    ) -> None:
        self.receiver = receiver
        self.layout = layout
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
    number: int | None,
    structure: bytes | None,
    pickled: bytes | None,
    raw: bytearray | None,
    waited: float,
) -> Arrival | Failed | None:
    """Turn a message into an arrival.

    Args:
        token: whose message it is.
        worker: who sent it.
        slab: where the bytes are; None if they are in `raw`, or there are none.
        number: of the structure, for this worker; None if it has none.
        structure: the structure, for which the number stands from now on; None if it does already.
        pickled: the leaves that are not packed, and the tensors that cannot be.
        raw: the bytes of a batch for which there was no slab.
        waited: seconds that the worker waited for slabs.
    """
    receiver = RECEIVERS.get(token)
    if receiver is None:  # it ended meanwhile
        return None
    try:
        known = receiver.structures[worker, number] if structure is None else structure
        if number is not None:
            receiver.structures[worker, number] = known  # also if it cannot be unpickled now
        if isinstance(known, bytes):
            known = load_structure(known)
            if number is not None:
                receiver.structures[worker, number] = known
        rest, others = pickle.loads(pickled) if pickled is not None else ([], [])
    except BaseException as error:
        if slab is not None:
            receiver.arrived(slab, None)
        if isinstance(error, Exception) and not isinstance(error, OSError):  # of which torch knows what to say
            return Failed(error)
        raise
    return Arrival(receiver, with_leaves(known, rest, others), slab, raw, others, waited)
