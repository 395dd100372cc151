from collections.abc import Callable
from typing import Any, Self

import torch

class Structure:
    num_leaves: int
    is_native: bool
    @classmethod
    def of(cls, batch: Any, handlers: dict[type, Any], /) -> tuple[Self, list[Any]]: ...
    @classmethod
    def restore(cls, nodes: list[Any], handlers: dict[type, Any], /) -> Self: ...
    def leaves(self, batch: Any, handlers: dict[type, Any], /) -> list[Any] | None: ...
    def rebuild(self, leaves: list[Any], /) -> Any: ...
    def nodes(self) -> list[tuple[int, int, Any, Any]]: ...

class Blocks:
    tensors: list[Any]
    @classmethod
    def of(
        cls,
        table: bytes,
        sharing: int,
        is_cuda: int,
        index: int,
        slab: Any = None,
        empty: Callable[..., Any] | None = None,
        view: Callable[..., Any] | None = None,
        /,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def copy(
        self, host: int, start: int, end: int, stream: int, is_page_locked: bool, /
    ) -> int: ...
    def copy_locked(self, sources: bytes, pieces: bytes, stream: int, at_once: bool, /) -> int: ...
    def touch(self, threads: int, /) -> None: ...
    def unpack(self, host: int, start: int, end: int, threads: int, /) -> None: ...
    def fill(self, sources: bytes, stream: int, stacks: dict[int, Stack], /) -> int: ...
    def leaves(self, others: list[Any], /) -> list[Any]: ...

class Stack:
    more_work: int
    def tensor(self) -> torch.Tensor: ...

def match(
    leaves: list[Any],
    existing: list[Any],
    table: bytes | None,
    types: tuple[set[type], frozenset[type]],
    device_type: int,
    device_index: int,
    /,
) -> tuple[dict[tuple[int, int], list[int]], list[int]]: ...
