"""Protocols and decorators as a user's classes meet them, and types that checkers infer. Checked by
mypy and pyright, never run; lines with an ignore must stay errors.

`tests/public_api.txt` has the annotations themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, assert_type

import torch

import pinstage as ps

# -- batches of a user's classes -------------------------------------------------------------------


@ps.register_node
class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@ps.register_node()
@dataclass
class Called:
    value: torch.Tensor


class Told:
    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values


def flatten(told: Told) -> tuple[list[torch.Tensor], None]:
    return told.values, None


def unflatten(children: Iterable[torch.Tensor], context: None) -> Told:
    return Told(list(children))


class Speaking:
    def __init__(self, value: torch.Tensor, name: str) -> None:
        self.value = value
        self.name = name

    def tree_flatten(self) -> tuple[tuple[torch.Tensor], str]:
        return (self.value,), self.name

    @classmethod
    def tree_unflatten(cls, metadata: str, children: Iterable[torch.Tensor]) -> Self:
        (value,) = children
        return cls(value, metadata)


class Silent:
    def tree_flatten(self) -> tuple[tuple[torch.Tensor], None]:
        raise NotImplementedError


@ps.register_tensor
class Marked(torch.Tensor):
    pass


def rebuild(tensor: torch.Tensor, attributes: dict[str, Any]) -> Marked:
    raise NotImplementedError


def registration_keeps_the_type() -> None:
    assert_type(Plain(torch.zeros(1)), Plain)
    assert_type(Called(torch.zeros(1)).value, torch.Tensor)
    assert_type(ps.register_node(Told, flatten, unflatten), type[Told])
    assert_type(Marked(), Marked)
    assert_type(ps.register_tensor(Marked, rebuild), type[Marked])
    assert_type(ps.on_host({"a"}), set[str])
    _node: ps.StagingNode = Speaking(torch.zeros(1), "name")


def wrong_registrations() -> None:
    ps.register_node(3)  # type: ignore[call-overload]
    ps.register_node(Told, 3, unflatten)  # type: ignore[call-overload]
    ps.register_node(Plain(torch.zeros(1)))  # type: ignore[call-overload]
    ps.register_tensor(3)  # type: ignore[arg-type]
    Plain("text")  # type: ignore[arg-type]
    Called(3)  # type: ignore[arg-type]
    _silent: ps.StagingNode = Silent()  # type: ignore[assignment]


# -- events and memory of a user's classes ---------------------------------------------------------


class Done:
    """Enough of an event for the pool."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Bounded:
    """A custom memory resource."""

    is_pinned = False
    is_shared = False
    granularity = 4096

    def allocate(self, nbytes: int) -> ps.memory.Block:
        return ps.memory.Block(0, nbytes)

    def deallocate(self, block: ps.memory.Block) -> None:
        pass


def memory_resources(lease: ps.Lease) -> None:
    own: ps.memory.MemoryResource = Bounded()
    for memory in (
        ps.memory.HostAllocMemory(),
        ps.memory.RegisteredMemory(),
        ps.memory.SharedMemory(),
        ps.memory.PageableMemory(),
        own,
    ):
        ps.SlabPool(1 << 20, memory=memory).close()
    lease.release(after=Done())
    lease.release(after=3)  # type: ignore[arg-type]
    ps.SlabPool(None)  # type: ignore[arg-type]
    _memory: ps.memory.MemoryResource = Done()  # type: ignore[assignment]


# -- attributes without an annotation --------------------------------------------------------------


def inferred(transfer: ps.Transfer[object], back: ps.HostTransfer[object]) -> int:
    assert_type(transfer.copies + back.copies, int)
    try:
        transfer.wait()
    except ps.errors.BudgetExceededError as error:
        _memory: MemoryError = error
        return error.requested_bytes + error.held_bytes + error.max_bytes
    except ps.errors.LayoutError as layout:
        _type: TypeError = layout
        assert_type(layout.path, str)
    return 0
