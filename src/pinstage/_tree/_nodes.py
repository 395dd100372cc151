"""Which objects are containers, and how a batch is taken apart as far as there are any.

Known without a word are dict, list and tuple subclasses, dataclasses, attrs classes, `UserDict` and `UserList`, classes
with the `StagingNode` protocol, those of some libraries (`_libraries`), and what optree or torch's pytree know; and
what `register_node` and `register_tensor` were given.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import optree
import torch
import torch.utils.data

from .._torch import registered_elsewhere, tell_once
from ..errors import LayoutError
from ._attributes import attribute_functions, builtin_base, has_attributes_only, maker_of
from ._checks import WrongFunctionsError, checked
from ._copies import unshared
from ._leaves import ATOM_TYPES, KINDS, Kind
from ._libraries import functions_of_pytree, is_of_library, library_functions
from ._paths import in_words
from ._registry import (
    BY_ATTRIBUTES,
    HANDLERS,
    MOST_CLASSES,
    NAMESPACE,
    REGISTERED,
    Flatten,
    Functions,
    Unflatten,
    register,
    unregister,
)
from ._special import without_sorting
from ._tensors import REBUILDS, Rebuild, one_walk, registered_base, tensor_functions

T = TypeVar("T")

_by_attributes: set[type] = set()  # classes given to register_node(cls) alone; their subclasses follow them


@runtime_checkable
class StagingNode(Protocol):
    """A class that needs no registration, because it has these two methods.

    The convention is that of JAX and optree, so a class written for them works unchanged. ``tree_unflatten`` is a class
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

    Given the class alone, an object is staged by its attributes. The result is a shallow copy, made without calling
    ``__init__``, in which tensors and arrays are staged and everything else is the same object. Attributes are what the
    object stores in ``__dict__`` or slots; properties are neither read nor set. Subclasses are registered too.

    Registering a class again in the same way does nothing. The two functions are tried on the first object that is
    staged. If `unflatten` takes its arguments in the other order, as torch's pytree passes them, that is a
    `LayoutError`.

    Args:
        cls: the class.
        flatten: returns ``(children, metadata)`` of an object; metadata must be hashable. What cannot be hashed may be
            a child, as ``Keep(...)``. Needs `unflatten`.
        unflatten: returns a new object from ``(metadata, children)``.

    Returns:
        `cls`, or a decorator if `cls` is None.

    Raises:
        TypeError: `cls` is not a class, or is a tensor class; only one of the two functions was given; or neither was,
            and the class keeps data outside its attributes (such as a subclass of `deque` or `set`).
        ValueError: the class is registered already, in another way.
    """
    if cls is None:
        return lambda decorated: register_node(decorated, flatten, unflatten)
    if not isinstance(cls, type):
        raise TypeError(f"register_node needs a class: {cls!r}; use it as @register_node or register_node(cls)")
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"register_node({cls.__name__}): flatten and unflatten go together; pass both or neither")
    if flatten is not None and unflatten is not None:
        _register(cls, (checked(cls, flatten, unflatten), unflatten), (flatten, unflatten))
    elif issubclass(cls, torch.Tensor):
        raise TypeError(f"register_node({cls.__name__}): it is a class of tensors; use pinstage.register_tensor")
    elif not has_attributes_only(cls):
        raise TypeError(
            f"register_node({cls.__name__}): its base {builtin_base(cls).__name__} keeps data that are no attributes; "
            "pass flatten and unflatten"
        )
    else:
        _register(cls, attribute_functions(cls), BY_ATTRIBUTES)
        _by_attributes.add(cls)
    HANDLERS.clear()
    return cls


def register_tensor(cls: type[T], rebuild: Rebuild | None = None) -> type[T]:
    """Make a subclass of `torch.Tensor` known, so that its tensors are packed with the rest. Also a class decorator.

    Its memory travels like any tensor's, and the result has the same class. The object's ``__dict__`` stays on the host
    and comes back unchanged. A class that wraps other tensors needs ``__tensor_flatten__`` and
    ``__tensor_unflatten__``, as for torch's compiler. Subclasses are registered too. Tensors that require grad move by
    their own ``.to()``.

    Args:
        cls: the class.
        rebuild: makes the staged object from the plain tensor and a dict of the attributes. None makes an object of the
            same class with the same attributes. Not for a class with ``__tensor_flatten__``.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not a subclass of `torch.Tensor`, or is `torch.nn.Parameter` or a subclass of it.
        ValueError: it was registered already, with another `rebuild`.
    """
    given: Any = cls
    if not (isinstance(given, type) and issubclass(given, torch.Tensor)) or given is torch.Tensor:
        raise TypeError(f"register_tensor needs a subclass of torch.Tensor: {cls!r}; register_node takes containers")
    if issubclass(cls, torch.nn.Parameter):
        raise TypeError(f"register_tensor({cls.__name__}): parameters are not packed; they go by their own .to()")
    if REBUILDS.get(cls, rebuild) is not rebuild or (cls in REGISTERED and cls not in REBUILDS):
        raise ValueError(f"register_tensor({cls.__name__}): it is already registered in another way")
    REBUILDS[cls] = rebuild
    HANDLERS.clear()
    return cls


def _register(cls: type, functions: Functions, how: Any) -> None:
    if register(cls, functions, how, again=False):
        _tell_of_pinning(cls)


def _tell_of_pinning(cls: type) -> None:
    """Tell, once, if a class has a method of its own that ``pin_memory=True`` would call."""
    method = getattr(cls, "pin_memory", None)
    if not callable(method) or is_of_library(getattr(method, "__module__", None) or cls.__module__):
        return
    if torch.utils.data.get_worker_info() is None:  # the main process tells it
        tell_once(
            f"{cls.__module__}.{cls.__qualname__}.pin_memory() is not called: pinstage packs the tensors of a batch "
            "into page-locked memory of its own; what else the method does has to be done elsewhere"
        )


def flatten(batch: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Take a batch apart as far as containers are known; leaves of other types come back as they are.

    Raises:
        LayoutError: the batch contains itself or is nested too deeply, or a class is taken apart wrongly.
    """
    try:
        with one_walk():
            return optree.tree_flatten(batch, namespace=NAMESPACE)
    except RecursionError:
        raise too_deep() from None
    except WrongFunctionsError as error:
        path = _where(batch, error)
        raise LayoutError(f"batch{path} cannot be taken apart: {error}", path) from None
    except RuntimeError:  # of torch, which compares tensors by their elements
        in_order = without_sorting(batch)
        if in_order is None:
            raise
        with one_walk():
            return optree.tree_flatten(in_order, namespace=NAMESPACE)


def _where(batch: Any, error: WrongFunctionsError) -> str:
    """Return the path of the first object that an error is about."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        batch, is_leaf=lambda obj: type(obj) is error.cls, namespace=NAMESPACE
    )
    for way, leaf in zip(accessors, leaves, strict=True):
        try:
            optree.tree_flatten(leaf, namespace=NAMESPACE)
        except LayoutError:
            return in_words(way)
    return ""


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


def forget_classes() -> None:
    """Let go of the classes that were met, if they are too many. Called before a walk: one of it may have as many."""
    if max(len(HANDLERS), len(KINDS)) > MOST_CLASSES:
        unregister()
        HANDLERS.clear()
        ATOM_TYPES.clear()  # before the kinds: a type that has one isn't added again
        KINDS.clear()


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
        handler = (maker_of(cls) or False) if REGISTERED.get(cls) == BY_ATTRIBUTES else False
    HANDLERS[cls] = handler
    return handler


def is_container_by_now(cls: type) -> bool:
    """Look again at a class that was met as a leaf: it may have been registered with optree since."""
    HANDLERS.pop(cls, None)
    return handler_of(cls) is not None


def moves_as_a_whole(cls: type) -> bool:
    """Say whether objects of a class that is no container go to a device by their own ``.to(device)``.

    It is the convention of Lightning and Accelerate. A module is none of them: its ``.to()`` changes the module.
    """
    return callable(getattr(cls, "to", None)) and (not issubclass(cls, torch.nn.Module) or moves_in_silence(cls))


def moves_in_silence(cls: type) -> bool:
    """Say whether nobody has to be told that objects of a class move as a whole: it is known to."""
    return library_functions(cls) is False


def _learn(cls: type) -> bool:
    if cls in REGISTERED:
        return True
    if KINDS[cls] is Kind.ATOM:
        return False
    found = library_functions(cls)
    if isinstance(found, bool):
        return False
    if found is not None:
        register(cls, (checked(cls, *found), found[1]), None, again=True)
        return True
    if issubclass(cls, torch.Tensor):
        functions = tensor_functions(cls)
        if functions is not None:
            register(cls, functions, None, again=True)
        return functions is not None
    functions, how = _functions_of(cls), None
    if functions is None and _goes_by_attributes(cls) and has_attributes_only(cls):
        functions, how = attribute_functions(cls), BY_ATTRIBUTES
        if issubclass(cls, dict | list) and not issubclass(cls, tuple(_by_attributes)):
            functions = unshared(cls, functions, _stays_the_same)
    if functions is None:
        functions = functions_of_pytree(cls)
    if functions is not None and register(cls, functions, how, again=True):
        _tell_of_pinning(cls)
    return functions is not None


def _stays_the_same(obj: Any) -> bool:
    """Say whether an object is in a staged batch as it is, although it may change."""
    return KINDS[type(obj)] is Kind.OPAQUE and handler_of(type(obj)) is None


def _functions_of(cls: type) -> Functions | None:
    own: Any = (getattr(cls, "tree_flatten", None), getattr(cls, "tree_unflatten", None))
    if all(map(callable, own)):
        return checked(cls, *own), own[1]
    # In another namespace. torch's own does not count: it is filled only when some part of torch happens to be
    # imported, and with leaves of ours (torch.Size, slice).
    for entry in registered_elsewhere(cls, ("torch",)):
        return entry.flatten_func, entry.unflatten_func
    return None


def _goes_by_attributes(cls: type) -> bool:
    by_attributes = (dict, list, tuple, UserDict, UserList, *_by_attributes)
    return issubclass(cls, by_attributes) or dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")


class NodeType:
    """A class as it travels in a pickle beside a tree structure: unpickling it makes it known first."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __reduce__(self) -> tuple[Any, ...]:
        cls, again = self.cls, None
        if REGISTERED.get(cls) == BY_ATTRIBUTES:
            again = "node"
        elif issubclass(cls, torch.Tensor) and REBUILDS.get(registered_base(cls)) is None:
            again = "tensor"
        return _restore_node_type, (cls, again)


def _restore_node_type(cls: type, again: str | None) -> NodeType:
    if not _learn(cls) and again is not None:
        register_node(cls) if again == "node" else register_tensor(cls)
        _learn(cls)
    return NodeType(cls)


def node_types(treespec: optree.PyTreeSpec) -> tuple[NodeType, ...]:
    """Return those classes in a tree that this room registered."""
    return tuple(NodeType(cls) for cls in dict.fromkeys(classes_in(treespec)) if cls in REGISTERED)


def classes_in(treespec: optree.PyTreeSpec) -> list[Any]:
    """Return the class of each node of a tree; None for a leaf."""
    found: list[Any] = []
    pending = [treespec]
    while pending:
        spec = pending.pop()
        found.append(spec.type)
        pending.extend(spec.children())
    return found
