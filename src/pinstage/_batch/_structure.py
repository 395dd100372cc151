"""The structure of a batch, and how a batch is taken apart into it and its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pinstage._native import _core

from ..errors import LayoutError
from ._handler import WrongFunctionsError, path_steps
from ._nodes import HANDLERS, forget_classes, registration_of

_MOST_REMEMBERED = 32

_LEAF, _DICT, _LIST, _TUPLE, _NOTHING, _NAMED, _INSTANCE, _CUSTOM = range(8)
"""Operations of nodes, as in ``_native/structure.c``."""

_BRACKETS = {_DICT: "{}", _LIST: "[]", _TUPLE: "()"}


class Structure(_core.Structure):
    """The containers of a batch, and where each leaf is. Holds nothing of the batch but metadata.

    Two structures are equal if they rebuild alike, the order of keys included. Picklable. Made by
    `walk`.
    """

    __slots__ = ()

    def matches(self, other: Structure) -> bool:
        """Return whether two structures are equal, apart from the order of keys in dicts."""
        return self == other or self._sorted() == other._sorted()

    def _sorted(self) -> list[Any]:
        return [
            (*node[:3], sorted(node[3]) if node[0] == _DICT else node[3]) for node in self.nodes()
        ]

    def path(self, leaf: int) -> str:
        """Return where a leaf is, as you would write it after the batch's name."""
        return self.paths()[leaf]

    def paths(self) -> list[str]:
        """Return where each leaf is."""
        paths: list[str] = []
        pending = [""]
        for operation, count, cls, keys in self.nodes():
            path = pending.pop()
            if operation == _LEAF:
                paths.append(path)
            else:
                pending += [path + step for step in _steps(operation, count, cls, keys)][::-1]
        return paths

    def __reduce__(self) -> tuple[Any, ...]:
        nodes = self.nodes()
        classes = dict.fromkeys(cls for operation, _, cls, _ in nodes if operation >= _NAMED)
        return _restore, ({cls: registration_of(cls) for cls in classes}, nodes)

    def __str__(self) -> str:
        made: list[str] = []
        for operation, count, cls, keys in reversed(self.nodes()):
            inside = [made.pop() for _ in range(count)]
            if operation == _DICT:
                inside = [
                    f"{key!r}: {text}" for key, text in zip(sorted(keys), inside, strict=True)
                ]
            name = "" if operation in _BRACKETS else getattr(cls, "__name__", "None")
            brackets = _BRACKETS.get(operation, "()" if count else "")
            text = f"{name}{brackets[:1]}{', '.join(inside)}{brackets[1:]}"
            made.append("*" if operation == _LEAF else text)
        return made[0]


_last: dict[tuple[type, int], Structure] = {}
"""The structure of the last batch of each type and length. Verifying that a batch has this
structure costs a third of walking it."""


def _steps(operation: int, count: int, cls: Any, keys: Any) -> list[str]:
    """Return the step of the path from a container to each child."""
    if operation == _CUSTOM:
        return _custom_steps(count, cls, *keys)
    if operation in (_NAMED, _INSTANCE):
        return path_steps((), keys if operation == _INSTANCE else cls._fields)
    return path_steps(sorted(keys) if operation == _DICT else range(count))


def _custom_steps(count: int, cls: Any, metadata: Any, entries: Any) -> list[str]:
    if entries is not None:
        return [f".{entry}" if isinstance(entry, str) else f"[{entry!r}]" for entry in entries]
    steps_of = getattr(HANDLERS[cls], "steps", None)
    if steps_of is None:
        return [f"[<child {index}>]" for index in range(count)]
    steps = list(steps_of(metadata))
    return steps + [""] * (count - len(steps))


def _restore(registrations: dict[type, Callable[[Any], Any] | None], nodes: list[Any]) -> Structure:
    for cls, register in registrations.items():
        if HANDLERS[cls] is None and register is not None:
            register(cls)
        if HANDLERS[cls] is None:
            raise LayoutError(
                f"{cls.__module__}.{cls.__qualname__} isn't registered in this process, only "
                "where the batch was made; call pinstage.register_node where the class is defined",
                "",
            )
    return Structure.restore(nodes, HANDLERS)


def walk(batch: Any) -> tuple[list[Any], Structure]:
    """Take a batch apart into its leaves; classes that are met for the first time are looked up.

    Returns:
        The leaves, and the structure. Keys of a dict are sorted if all of them are text.

    Raises:
        LayoutError: the batch contains itself, is nested too deeply, or a class is taken apart
            wrongly.
    """
    kind = type(batch)
    key = (kind, len(batch) if kind in (dict, list, tuple) else 0)
    try:
        last = _last.get(key)
        leaves = None if last is None else last.leaves(batch, HANDLERS)
        if last is not None and leaves is not None:
            return leaves, last
        forget_classes()
        structure, leaves = Structure.of(batch, HANDLERS)
    except RecursionError:
        raise LayoutError(
            "batch refers to itself, or is nested more than 1000 levels deep; stage the tensors "
            "without the back reference, or register_node(cls, flatten, unflatten) the class "
            "that holds it",
            "",
        ) from None
    except WrongFunctionsError as error:
        path = _where(batch, error)
        raise LayoutError(f"batch{path} cannot be taken apart: {error}", path) from None
    if structure.is_native:  # others hold metadata, which may be of any size
        _last[key] = structure
        if len(_last) > _MOST_REMEMBERED:
            _last.clear()
    return leaves, structure


def _where(batch: Any, error: WrongFunctionsError) -> str:
    """Return the path of the first object that an error is about."""
    structure, leaves = Structure.of(batch, type(HANDLERS)(HANDLERS | {error.cls: None}))
    for index, leaf in enumerate(leaves):
        try:
            if type(leaf) is error.cls:
                Structure.of(leaf, HANDLERS)
        except WrongFunctionsError:
            return structure.path(index)
    return ""
