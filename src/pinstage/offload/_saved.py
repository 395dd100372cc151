"""What autograd keeps in the place of a tensor, and what is sent for it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from .._torch import Changes, version_of
from ._away import Away, bytes_of, range_of, view_of

ALIGNMENT = 512
"""What is sent begins at a multiple of it in its storage, as the storage does in CUDA's memory, so that a tensor comes
back aligned as it was: kernels choose their way by that, and sums depend on it."""

GAPS = 2
"""A tensor whose elements are spread over more than so many times their bytes, such as the queries in a product of
queries, keys and values, is sent without what lies between them."""


class Origin(Protocol):
    """Where a tensor was saved."""

    def bring(self, saved: Saved) -> torch.Tensor:
        """Return a saved tensor, for the current stream."""
        ...


class Saved:
    """What autograd keeps in the place of a tensor that has gone. With the last of them the bytes go."""

    __slots__ = (
        "__weakref__",
        "asked_in",
        "away",
        "begin",
        "changes",
        "dtype",
        "end",
        "seq",
        "shape",
        "stride",
        "trail",
    )

    def __init__(self, trail: Origin, tensor: torch.Tensor, away: Away, seq: int) -> None:
        self.trail = trail
        self.away = away
        self.seq = seq
        self.asked_in = 0  # the pass
        self.changes = Changes(tensor)
        self.begin, self.end = range_of(tensor)
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()

    def unpack(self) -> torch.Tensor:
        """Return the tensor, for the current stream."""
        if self.changes.are_there():
            raise changed(self.shape, self.dtype)
        return self.trail.bring(self)

    def on(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the tensor over memory in which the storage's byte `begin` comes first, or its elements alone."""
        if self.away.packed is None:
            return view_of(memory.untyped_storage(), self.begin - begin, self.dtype, self.shape, self.stride)
        elements = view_of(memory.untyped_storage(), 0, self.dtype, self.shape, self.away.packed)
        start = self.begin % ALIGNMENT
        room = torch.empty(start + self.end - self.begin, dtype=torch.uint8, device=memory.device)
        return view_of(room.untyped_storage(), start, self.dtype, self.shape, self.stride).copy_(elements)


def changed(shape: Any, dtype: torch.dtype) -> RuntimeError:
    """Return the error of a tensor that was changed after it was saved: autograd's own, with hooks or without."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"{dtype}, shape {tuple(shape)}, after save_on_cpu had saved it; change a clone() of it"
    )


class Stayed:
    """What autograd keeps in the place of a tensor that stayed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # the tensor itself would hold the graph that holds this
        self._version = version_of(tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        if version_of(self._tensor) != self._version:
            raise changed(self._tensor.shape, self._tensor.dtype)
        return self._tensor


class Load(NamedTuple):
    """What is sent for a tensor."""

    source: torch.Tensor
    """uint8 ``[n]``"""
    begin: int
    """Where it begins in the tensor's storage; 0 for elements alone."""
    packed: tuple[int, ...] | None
    """The strides of the elements, where they are sent alone."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Load:
        """Return what is to be sent. Elements that are spread out are gathered, on the current stream."""
        begin, end = range_of(tensor)
        if end - begin > GAPS * tensor.nbytes:
            elements = tensor.detach().clone()
            return cls(bytes_of(elements.untyped_storage(), 0, elements.nbytes), 0, elements.stride())
        begin = begin // ALIGNMENT * ALIGNMENT
        return cls(bytes_of(tensor.untyped_storage(), begin, end), begin, None)
