"""The offset table and containers as a user writes them. Checked by mypy, never run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, assert_type

import numpy as np
import torch

import pinstage as ps
from pinstage._batch import Slot, StagingNode


def by_hand(batch: object, pool: ps.SlabPool) -> Any:
    layout = ps.Layout.of(batch)
    assert_type(layout, ps.Layout)
    assert_type(layout.nbytes, int)
    with pool.acquire(layout.nbytes) as lease:
        layout.pack(batch, lease.tensor())
        assert_type(layout.unpack(lease.tensor()), Any)
    return {layout: str(layout)}


def rows(layout: ps.Layout) -> None:
    assert_type(layout.slots, tuple[Slot, ...])
    for slot in layout.slots:
        assert_type(slot.path, str)
        assert_type(slot.offset, int)
        assert_type(slot.nbytes, int)
        assert_type(slot.dtype, torch.dtype)
        assert_type(slot.shape, tuple[int, ...])
        assert_type(slot.stride, tuple[int, ...])


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


def registration_keeps_the_type() -> None:
    assert_type(Plain(torch.zeros(1)), Plain)
    assert_type(Called(torch.zeros(1)).value, torch.Tensor)
    assert_type(ps.register_node(Told, flatten, unflatten), type[Told])
    node: StagingNode = Speaking(torch.zeros(1), "name")
    assert_type(isinstance(node, StagingNode), bool)


class Marked(torch.Tensor):
    pass


@ps.register_tensor
class Decorated(torch.Tensor):
    pass


def rebuild(tensor: torch.Tensor, attributes: dict[str, Any]) -> Marked:
    raise NotImplementedError


def tensors_and_kept_things() -> None:
    assert_type(ps.register_tensor(Marked, rebuild), type[Marked])
    assert_type(Decorated(), Decorated)
    assert_type(ps.on_host({"a"}), set[str])
    ps.register_tensor(3)  # type: ignore[arg-type]


def wrong(layout: ps.Layout, batch: object) -> None:
    ps.Layout(batch)  # type: ignore[call-arg, arg-type]
    layout.pack(batch)  # type: ignore[call-arg]
    layout.pack(batch, np.zeros(3, dtype=np.uint8))  # type: ignore[arg-type]
    layout.unpack(b"bytes")  # type: ignore[arg-type]
    layout.nbytes = 3  # type: ignore[misc]
    layout.slots[0].offset = 3  # type: ignore[misc]
    layout.slots[0].size  # type: ignore[attr-defined]  # noqa: B018
    ps.register_node(3)  # type: ignore[call-overload]
    ps.register_node(Told, 3, unflatten)  # type: ignore[call-overload]
    ps.register_node(Plain(torch.zeros(1)))  # type: ignore[call-overload]
    Plain("text")  # type: ignore[arg-type]
    Called(3)  # type: ignore[arg-type]
    _silent: StagingNode = Silent()  # type: ignore[assignment]
