"""`Offloaded`: the handle of tensors that are kept on the host while they aren't in use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedStats:
    """Where the bytes of an `Offloaded` are: a snapshot, returned by its `stats()`."""

    host_bytes: int
    """Bytes in slabs of the pool."""
    device_bytes: int
    """Device memory that the handle holds for bytes that were or are being copied back."""
    stayed_at_cap_bytes: int = 0
    """Bytes that stayed on the device at the last `offload`, because the pool had no room."""


class Offloaded(ABC):
    """Tensors on the host while they aren't in use. Returned by `optimizer_state` and
    `frozen_module`.

    In a ``with`` block the tensors are on the device. The block's end offloads them again, even
    after an exception.
    """

    @abstractmethod
    def onload(self) -> None:
        """Start copying to the device, behind earlier work of the current stream. Doesn't block."""

    @abstractmethod
    def offload(self) -> None:
        """Copy changed tensors to the host, and free the device memory behind earlier work of the
        current stream.

        Doesn't block, unless a frozen module has buffers: then it waits for that work.
        """

    @abstractmethod
    def stats(self) -> OffloadedStats:
        """Return the bytes on the host and on the device. Doesn't block."""

    @abstractmethod
    def close(self) -> None:
        """End the offloading. May be called again."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None:
        self.offload()
