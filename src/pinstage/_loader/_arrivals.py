"""What comes out of the worker queue in the main process."""

from __future__ import annotations

import pickle
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from .._layout import Layout, load_structure, with_leaves

if TYPE_CHECKING:
    import torch

    from ._keeper import SlotKeeper

KEEPERS: weakref.WeakValueDictionary[int, SlotKeeper] = weakref.WeakValueDictionary()
"""The keepers of this process, by the number that their workers' messages carry."""


class Message:
    """A batch as a worker sends it. What comes out at the other end is an `Arrival`.

    That happens in unpickling, in whatever part of torch's loader reads the queue: so also a batch that torch drops
    there (a reset of persistent workers) gives its slot back, and no definition of a layout is missed.
    """

    __slots__ = ("contents",)

    def __init__(self, *contents: Any) -> None:
        self.contents = contents

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, self.contents


class Arrival:
    """A packed batch in the main process. One that is dropped gives its slot back."""

    __slots__ = ("keeper", "layout", "others", "raw", "slot", "waited")

    def __init__(
        self,
        keeper: SlotKeeper,
        layout: Layout,
        slot: int | None,
        raw: bytearray | None,
        others: list[torch.Tensor],
        waited: float,
    ) -> None:
        self.keeper = keeper
        self.layout = layout
        self.slot = slot
        self.raw = raw
        self.others = others
        self.waited = waited

    def __del__(self) -> None:
        if self.slot is not None:
            self.keeper.dropped(self.slot)


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
    slot: int | None,
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
        slot: where the bytes are; None if they are in `raw`, or there are none.
        number: of the structure, for this worker; None if it has none.
        structure: the structure, for which the number stands from now on; None if it does already.
        pickled: the leaves that are not packed, and the tensors that cannot be.
        raw: the bytes of a batch for which there was no slot.
        waited: seconds that the worker waited for slots.
    """
    keeper = KEEPERS.get(token)
    if keeper is None:  # it ended meanwhile
        return None
    try:
        known = keeper.structures[worker, number] if structure is None else structure
        if number is not None:
            keeper.structures[worker, number] = known  # also if it cannot be unpickled now
        if isinstance(known, bytes):
            known = load_structure(known)
            if number is not None:
                keeper.structures[worker, number] = known
        rest, others = pickle.loads(pickled) if pickled is not None else ([], [])
    except BaseException as error:
        if slot is not None:
            keeper.dropped(slot)
        if isinstance(error, Exception) and not isinstance(error, OSError):  # of which torch knows what to say
            return Failed(error)
        raise
    return Arrival(keeper, with_leaves(known, rest, others), slot, raw, others, waited)
