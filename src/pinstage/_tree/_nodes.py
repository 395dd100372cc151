"""Which objects are containers, and how each is taken apart and put together again.

optree walks the tree. Python's own containers it knows; the others are made known to it, in a namespace of ours, when
they are first met: dict, list and tuple subclasses, dataclasses, attrs classes, `UserDict` and `UserList`, classes with
the `StagingNode` protocol, and what `register_node` was given. From then on the walk stays in C++.

An object is put together again as `copy.copy` would: a new instance without a call of ``__init__`` whose stored
attributes, ``__dict__`` and slots alike, are set underneath any property or frozen ``__setattr__``.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import threading
import warnings
from collections import UserDict, UserList, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from .._torch import registered_elsewhere
from ..errors import LayoutError

NAMESPACE = "pinstage"

T = TypeVar("T")
Flatten = Callable[[Any], tuple[Iterable[Any], Hashable] | tuple[Iterable[Any], Hashable, Iterable[Any]]]
Unflatten = Callable[[Any, Any], Any]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, as a rule

_lock = threading.Lock()
_registered: set[type] = set()
_by_attributes: set[type] = set()  # classes given to register_node(cls) alone; their subclasses follow them
_makers: dict[type, Callable[[], Any]] = {}  # of classes that are no more than their __dict__
_slots: dict[type, dict[str, Any]] = {}

HANDLERS: dict[type, Any] = {}
"""What the native walk does with a class that is none of Python's plain containers, no tensor and no array: None for a
leaf, True for a named tuple, what makes a new one of a class that is no more than its ``__dict__``, and False for what
only optree knows."""


def _unlock() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not there may hold it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


@runtime_checkable
class StagingNode(Protocol):
    """A class that says itself how it is taken apart; it needs no registration.

    It is the convention of JAX and optree, so a class written for them works as it is. ``tree_unflatten`` is a class
    method.
    """

    def tree_flatten(self) -> tuple[Iterable[Any], Hashable]:
        """Return the children, in a fixed order, and hashable metadata that the children do not carry."""
        ...

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any, /) -> Any:
        """Build an instance from metadata and staged children."""
        ...


@overload
def register_node(cls: type[T], flatten: Flatten | None = None, unflatten: Unflatten | None = None) -> type[T]: ...
@overload
def register_node(
    cls: None = None, flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> Callable[[type[T]], type[T]]: ...
def register_node(
    cls: type[T] | None = None, flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class known as a container, so that the tensors in it are staged. Also a class decorator.

    Given the class alone, an object is staged by its attributes: the result is a shallow copy, made without calling
    ``__init__``, in which tensors and arrays are staged and everything else is the very same object. Attributes are
    what the object stores, in ``__dict__`` or slots; properties are neither read nor set. Subclasses follow.

    Args:
        cls: the class.
        flatten: returns ``(children, metadata)`` of an object; metadata must be hashable. Goes with `unflatten`.
        unflatten: returns a new object from ``(metadata, children)``.

    Returns:
        `cls`, or a decorator if `cls` is None.

    Raises:
        TypeError: `cls` is no class; only one of the two functions was given; neither was, and the class keeps data
            that are no attributes (a subclass of `deque` or `set`, say).
        ValueError: the class is a container already.
    """
    if cls is None:
        return lambda decorated: register_node(decorated, flatten, unflatten)
    if not isinstance(cls, type):
        raise TypeError(f"register_node needs a class: {cls!r}; use it as @register_node or register_node(cls)")
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"register_node({cls.__name__}): flatten and unflatten go together; pass both or neither")
    if flatten is not None and unflatten is not None:
        _register(cls, flatten, unflatten, again=False)
    elif not _has_attributes_only(cls):
        raise TypeError(
            f"register_node({cls.__name__}): its base {_builtin_base(cls).__name__} keeps data that are no attributes; "
            "pass flatten and unflatten"
        )
    else:
        _register(cls, *_attribute_functions(cls), again=False)
        _by_attributes.add(cls)
    HANDLERS.clear()
    return cls


def flatten(batch: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Take a batch apart as far as containers are known; leaves of other types come back as they are.

    Raises:
        LayoutError: the batch contains itself or is nested too deeply.
    """
    try:
        return optree.tree_flatten(batch, namespace=NAMESPACE)
    except RecursionError:
        raise too_deep() from None


def too_deep() -> LayoutError:
    """Return the error of a batch that has no end."""
    return LayoutError(
        "batch refers to itself, or is nested deeper than the recursion limit; stage the tensors without the back "
        "reference, or register_node(cls, flatten, unflatten) the class that holds it"
    )


def learn_containers(types: set[type]) -> bool:
    """Register those leaf types that are containers by themselves; say whether there were any.

    One that another thread has registered since the batch was walked counts too: no container is remembered as none.
    """
    learned = [_learn(cls) for cls in types if HANDLERS.get(cls, False) is not None]  # all of them, not up to the first
    return any(learned)


def handler_of(cls: type) -> Any:
    """Find out what the native walk does with a class; see `HANDLERS`.

    The cases: a leaf, which optree does not know even after it was looked at; a named tuple; a class that is no more
    than its ``__dict__``; anything else that is a container is optree's.
    """
    found = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    if found is None and _learn(cls):
        found = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    if found is None:
        handler: Any = None
    elif found.kind is optree.PyTreeKind.NAMEDTUPLE:
        handler = True
    else:
        handler = _makers.get(cls, False)
    HANDLERS[cls] = handler
    return handler


def is_container_by_now(cls: type) -> bool:
    """Look again at a class that was met as a leaf: it may have been registered with optree since."""
    HANDLERS.pop(cls, None)
    return handler_of(cls) is not None


def _learn(cls: type) -> bool:
    if cls in _registered:
        return True
    if issubclass(cls, type | torch.Tensor | enum.Enum):
        return False
    functions = _functions_of(cls)
    if functions is not None:
        _register(cls, *functions, again=True)
    return functions is not None


def _functions_of(cls: type) -> tuple[Flatten, Unflatten] | None:
    own: Any = (getattr(cls, "tree_flatten", None), getattr(cls, "tree_unflatten", None))
    if all(map(callable, own)):
        return own  # type: ignore[no-any-return]
    # In another namespace. torch's own does not count: it is filled only when some part of torch happens to be
    # imported, and with leaves of ours (torch.Size, slice).
    for entry in registered_elsewhere(cls, ("torch",)):
        return entry.flatten_func, entry.unflatten_func
    if cls is not torch.Size and issubclass(cls, dict | list | tuple):
        return _attribute_functions(cls)
    by_attributes = (UserDict, UserList, *_by_attributes)
    if issubclass(cls, by_attributes) or dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return _attribute_functions(cls) if _has_attributes_only(cls) else None
    return None


def _register(cls: type, flatten: Flatten, unflatten: Unflatten, *, again: bool) -> None:
    with _lock:
        if cls in _registered and again:
            return
        # Not `catch_warnings`, which changes the whole process for a moment, in any thread.
        warnings.filterwarnings("ignore", "PyTree type .* is a subclass of", UserWarning, module=re.escape(__name__))
        optree.register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)
        _registered.add(cls)
        HANDLERS.clear()


class NodeType:
    """A class as it travels in a pickle beside a tree structure: unpickling it makes it known first."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_node_type, (self.cls, self.cls in _by_attributes)


def _restore_node_type(cls: type, by_attributes: bool) -> NodeType:
    if not _learn(cls) and by_attributes:
        register_node(cls)
    return NodeType(cls)


def node_types(treespec: optree.PyTreeSpec) -> tuple[NodeType, ...]:
    """Return those classes in a tree that this room registered."""
    found: dict[type, None] = {}
    pending = [treespec]
    while pending:
        spec = pending.pop()
        if spec.type in _registered:
            found[spec.type] = None
        pending.extend(spec.children())
    return tuple(NodeType(cls) for cls in found)


# -- by attributes -----------------------------------------------------------------------------------------------------


def slots_of(cls: type) -> dict[str, Any]:
    """Return the slots of a class and its bases: name to descriptor."""
    found = _slots.get(cls)
    if found is None:
        found = {}
        for base in cls.__mro__:
            names = base.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                private = name.startswith("__") and not name.endswith("__")  # the compiler put the class before it
                stored = f"_{base.__name__.lstrip('_')}{name}" if private else name
                if stored in base.__dict__ and stored not in ("__dict__", "__weakref__"):
                    found.setdefault(stored, base.__dict__[stored])
        _slots[cls] = found
    return found


def stored_attributes(obj: Any) -> dict[str, Any]:
    """Return what an object stores: its slots that are set, then its ``__dict__``."""
    stored = {}
    for name, descriptor in slots_of(type(obj)).items():
        try:
            stored[name] = descriptor.__get__(obj)
        except AttributeError:  # not set
            continue
    stored.update(getattr(obj, "__dict__", ()))
    return stored


def _set_attributes(obj: Any, names: Iterable[str], values: Iterable[Any]) -> None:
    slots = slots_of(type(obj))
    for name, value in zip(names, values, strict=True):
        if name in slots:
            slots[name].__set__(obj, value)
        else:
            obj.__dict__[name] = value


def _builtin_base(cls: type) -> Any:
    """Return the first class in the order of resolution that is not written in Python: its methods ask no override.

    Some of those are heap types nevertheless (`deque` from Python 3.12 on); they have a ``__new__`` in C of their own.
    """
    return next(
        base
        for base in cls.__mro__
        if not base.__flags__ & _HEAP_TYPE or getattr(base.__new__, "__self__", None) is base
    )


def _has_attributes_only(cls: type) -> bool:
    """Say whether an instance is no more than its stored attributes, and its items if it is a dict, list or tuple."""
    return _builtin_base(cls) in (object, SimpleNamespace) or issubclass(cls, dict | list | tuple)


def _attribute_functions(cls: type) -> tuple[Flatten, Unflatten]:
    """Return functions that take an instance apart into its items, if it has any, and its stored attributes."""
    base = _builtin_base(cls)
    if issubclass(cls, dict):

        def flatten_dict(obj: Any) -> tuple[Any, Any, Any]:
            keys = tuple(base.keys(obj))
            stored = stored_attributes(obj)
            metadata = (keys, tuple(stored), obj.default_factory if isinstance(obj, defaultdict) else None)
            entries = (*map(_Item, keys), *stored)
            return (*base.values(obj), *stored.values()), metadata, entries

        def unflatten_dict(metadata: Any, children: Any) -> Any:
            keys, names, factory = metadata
            children = tuple(children)
            obj = base.__new__(cls)
            if isinstance(obj, defaultdict):
                obj.default_factory = factory
            _set_attributes(obj, names, children[len(keys) :])
            for key, value in zip(keys, children, strict=False):
                base.__setitem__(obj, key, value)
            return obj

        return flatten_dict, unflatten_dict

    if issubclass(cls, list | tuple):

        def flatten_sequence(obj: Any) -> tuple[Any, Any, Any]:
            items = tuple(base.__iter__(obj))
            stored = stored_attributes(obj)
            entries = (*map(_Item, range(len(items))), *stored)
            return (*items, *stored.values()), (len(items), tuple(stored)), entries

        def unflatten_sequence(metadata: Any, children: Any) -> Any:
            count, names = metadata
            children = tuple(children)
            obj: Any
            if base is list:
                obj = base.__new__(cls)
                list.extend(obj, children[:count])
            else:
                obj = base.__new__(cls, children[:count])
            _set_attributes(obj, names, children[count:])
            return obj

        return flatten_sequence, unflatten_sequence

    if not slots_of(cls) and cls.__dictoffset__:  # the usual case, at half the cost

        def flatten_dict_alone(obj: Any) -> tuple[Any, Any, Any]:
            stored = obj.__dict__
            names = tuple(stored)
            return stored.values(), names, names

        _makers[cls] = partial(base.__new__, cls)

        def unflatten_dict_alone(names: Any, children: Any) -> Any:
            obj = base.__new__(cls)
            obj.__dict__.update(zip(names, children, strict=True))
            return obj

        return flatten_dict_alone, unflatten_dict_alone

    def flatten_object(obj: Any) -> tuple[Any, Any, Any]:
        stored = stored_attributes(obj)
        names = tuple(stored)
        return stored.values(), names, names

    def unflatten_object(names: Any, children: Any) -> Any:
        obj = base.__new__(cls)
        _set_attributes(obj, names, children)
        return obj

    return flatten_object, unflatten_object


class _Item:
    """A path entry that is an item (``[key]``), beside plain strings that are attributes."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Item) and self.key == other.key

    def __hash__(self) -> int:
        return hash((_Item, self.key))


def path_text(treespec: optree.PyTreeSpec, position: int) -> str:
    """Return where a leaf is, as one would write it after the batch's name: ``.streams['wind'][3]``."""
    return _in_words(treespec.accessors()[position])


def path_texts(treespec: optree.PyTreeSpec) -> list[str]:
    """Return where each leaf is; see `path_text`."""
    return list(map(_in_words, treespec.accessors()))


def _in_words(accessor: optree.PyTreeAccessor) -> str:
    text = ""
    for entry in accessor:
        key = entry.entry
        if isinstance(key, _Item):
            text += f"[{key.key!r}]"
        elif entry.type in _registered and isinstance(key, str):
            text += f".{key}"
        else:
            text += entry.codify("")
    return text


# -- PackedSequence ----------------------------------------------------------------------------------------------------


def _flatten_packed_sequence(packed: Any) -> tuple[Any, Any, Any]:
    # batch_sizes has to stay on the CPU (torch.nn.utils.rnn), so it travels as a value; a tensor is not hashable.
    children = (packed.data, packed.sorted_indices, packed.unsorted_indices)
    return children, tuple(packed.batch_sizes.tolist()), ("data", "sorted_indices", "unsorted_indices")


def _unflatten_packed_sequence(batch_sizes: Any, children: Any) -> Any:
    data, sorted_indices, unsorted_indices = children
    batch_sizes = torch.tensor(batch_sizes, dtype=torch.int64, device="cpu")
    return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


# optree would take it for a namedtuple and stage batch_sizes with the rest.
_register(PackedSequence, _flatten_packed_sequence, _unflatten_packed_sequence, again=True)
