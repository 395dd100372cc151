"""Containers: one table of handlers, by class, which the walk uses.

Supported out of the box are dict, list and tuple subclasses, dataclasses, attrs classes, `UserDict`
and `UserList`, classes with the `StagingNode` protocol, classes of some libraries (`_libraries`),
and classes that are registered with torch's pytree. Other classes are given to `register_node` and
`register_tensor`. A class is looked up when it is first met.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import torch
import torch.utils.data
from torch.nn.utils.rnn import PackedSequence

from .._compat.probes import warn_once
from ._attributes import builtin_base, has_attributes_only, set_attributes
from ._copies import attribute_handler
from ._handler import MOST_CLASSES, Flatten, Handler, Unflatten, checked, path_steps
from ._leaves import ATOM_TYPES, IS_ATOM, OnHost, Whole, is_atom
from ._libraries import is_of_library, library_functions, pytree_handler

Rebuild = Callable[[torch.Tensor, dict[str, Any]], Any]

REBUILDS: dict[type, Rebuild | None] = {}
"""The classes registered with `register_tensor`; their subclasses are treated alike."""


def rebuild_of(cls: type) -> Any:
    """Return the `rebuild` registered for a class or its base; False if neither is registered."""
    return next((REBUILDS[base] for base in cls.__mro__ if base in REBUILDS), False)


def tensor_handler(cls: Any) -> Handler | None:
    """Return the handler for tensors of a class; None if they move by their own ``.to()``.

    A tensor with tensors inside is taken apart by ``__tensor_flatten__``, the protocol of torch's
    compiler. Any other becomes a plain tensor over the same memory, and its ``__dict__``. A tensor
    that is met twice in a walk is packed once, because its parts are the same objects. The metadata
    is None for a tensor that moves as a whole.
    """
    rebuild = rebuild_of(cls)
    if rebuild is False:
        return None
    is_wrapper = hasattr(cls, "__tensor_flatten__")
    make = partial(_in_class, cls) if rebuild is None else rebuild

    def flatten(tensor: Any, met: dict[Any, Any]) -> tuple[Any, Any]:
        if tensor.requires_grad:
            return (_once(met, id(tensor), tensor, Whole),), None
        if not is_wrapper:
            return (_once(met, id(tensor), tensor, _plain), OnHost(dict(vars(tensor)))), ()
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
        rest = {name: part for name, part in inner.items() if name not in parts}
        kept = OnHost((names, rest, context, tensor.size(), tensor.stride()))
        return (*parts.values(), kept), tuple(parts)

    def unflatten(metadata: Any, children: Any, met: dict[Any, Any]) -> Any:
        if metadata is None:
            return children[0]
        *parts, kept = children
        if not is_wrapper:
            return _once(met, (id(parts[0]), cls), parts[0], lambda plain: make(plain, kept))
        names, rest, context, size, stride = kept
        inner = dict(zip(metadata, parts, strict=True)) | rest
        return cls.__tensor_unflatten__(
            {name: inner[name] for name in names}, context, size, stride
        )

    return Handler(flatten, unflatten, lambda names: path_steps((), names or ()), asks=True)


def _once(met: dict[Any, Any], key: Any, tensor: Any, make: Callable[[Any], Any]) -> Any:
    """Return the object made for a key in this walk. The tensor is kept alive, since the key may
    have its id.
    """
    if key not in met:
        met[key] = make(tensor), tensor
    return met[key][0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor. A class can't override this function, see `torch.overrides`."""
    return torch.Tensor.as_subclass(tensor, torch.Tensor)


def _in_class(cls: Any, plain: torch.Tensor, attributes: dict[str, Any]) -> Any:
    made = plain.as_subclass(cls)
    vars(made).update(attributes)
    return made


T = TypeVar("T")

_BY_ATTRIBUTES = None, None

REGISTERED: dict[type, Any] = {}
"""The classes registered with `register_node`, each with its two functions, or `_BY_ATTRIBUTES`."""


# -- Python's own, and torch's ---------------------------------------------------------------------


def _flatten_dict(obj: Any) -> tuple[Any, Any]:
    keys, factory = tuple(obj), getattr(obj, "default_factory", None)
    attributes = getattr(obj, "__dict__", {})  # of an OrderedDict, such as a module's state
    children, names = (*obj.values(), *attributes.values()), tuple(attributes)
    # As in `optimizer.state`: a layout must not keep them.
    if any(isinstance(key, torch.Tensor) for key in keys):
        return (*children, OnHost(keys)), (factory, len(keys), names)
    return children, (factory, keys, names)


def _unflatten_dict(cls: Any, metadata: Any, children: Any) -> Any:
    factory, keys, names = metadata
    if isinstance(keys, int):
        *children, keys = children
    items = zip(keys, children[: len(keys)], strict=True)
    made = defaultdict(factory, items) if cls is defaultdict else cls(items)
    set_attributes(made, names, children[len(keys) :])
    return made


def _steps_of_dict(metadata: Any) -> list[str]:
    _, keys, names = metadata
    if isinstance(keys, int):  # a tensor is too long to be written out, and may be on a device
        return [f"[<key {number}>]" for number in range(keys)] + path_steps((), names)
    return path_steps(keys, names)


def _flatten_packed_sequence(packed: Any) -> tuple[Any, Any]:
    # batch_sizes have to stay on the CPU (torch.nn.utils.rnn), so they are metadata; a tensor
    # cannot be compared.
    return (packed.data, packed.sorted_indices, packed.unsorted_indices), tuple(
        packed.batch_sizes.tolist()
    )


def _unflatten_packed_sequence(batch_sizes: Any, children: Any) -> Any:
    batch_sizes = torch.tensor(batch_sizes, dtype=torch.int64, device="cpu")
    return PackedSequence(children[0], batch_sizes, *children[1:])


_BUILTIN: dict[type, Handler] = {
    **{
        cls: Handler(_flatten_dict, partial(_unflatten_dict, cls), _steps_of_dict)
        for cls in (dict, OrderedDict, defaultdict)
    },
    deque: Handler(
        lambda obj: (tuple(obj), (len(obj), obj.maxlen)),
        lambda metadata, children: deque(children, metadata[1]),
        lambda metadata: path_steps(range(metadata[0])),
    ),
    PackedSequence: Handler(
        _flatten_packed_sequence,
        _unflatten_packed_sequence,
        lambda _: (".data", ".sorted_indices", ".unsorted_indices"),
    ),
}
"""The walk itself handles lists, tuples, and dicts whose keys are text."""


def _sequence_handler(cls: Any) -> Any:
    """Return how a named tuple, or a tuple of torch's ``return_types``, is taken apart; None for
    other classes.
    """
    if not issubclass(cls, tuple):
        return None
    if hasattr(cls, "_fields"):
        return True
    if not hasattr(cls, "n_sequence_fields"):
        return None
    steps = path_steps((), cls.__match_args__)
    return Handler(
        lambda obj: (tuple(obj), None), lambda _, children: cls(children), lambda _: steps
    )


# -- what users register ---------------------------------------------------------------------------


@runtime_checkable
class StagingNode(Protocol):
    """A class that needs no registration, because it has these two methods.

    The convention is that of JAX and optree, so a class written for them works unchanged.
    ``tree_unflatten`` is a class method.
    """

    def tree_flatten(self) -> tuple[Iterable[Any], Hashable]:
        """Return the children, in a fixed order, and hashable metadata that the children do not
        carry.
        """
        ...

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any, /) -> Any:
        """Build an instance from metadata and staged children."""
        ...


@overload
def register_node(
    cls: type[T], flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> type[T]: ...
@overload
def register_node(
    cls: None = None, flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> Callable[[type[T]], type[T]]: ...
def register_node(
    cls: type[T] | None = None, flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class known as a container, so that the tensors in it are staged. Also a class
    decorator.

    Given the class alone, an object is staged by its attributes. The result is a shallow copy, made
    without calling ``__init__``, in which tensors and arrays are staged and everything else is the
    same object. Attributes are what the object stores in ``__dict__`` or slots; properties are
    neither read nor set. Subclasses are registered too.

    Registering a class again in the same way does nothing.

    Args:
        cls: the class.
        flatten: returns ``(children, context)`` of an object; the context must be hashable.
            Unhashable parts may be children, as ``on_host(...)``. Needs `unflatten`.
        unflatten: takes ``(children, context)``, the order of torch's pytree, and returns a new
            object. `children` is a tuple.

    Returns:
        `cls`, or a decorator if `cls` is None.

    Raises:
        TypeError: `cls` is not a class, or is a tensor class; only one of the two functions was
            given; or neither was, and the class keeps data outside its attributes (such as a
            subclass of `deque` or `set`).
        ValueError: the class is registered already, in another way, or was met as a container
            before.
    """
    if cls is None:
        return lambda decorated: register_node(decorated, flatten, unflatten)
    if not isinstance(cls, type):
        raise TypeError(
            f"register_node needs a class: {cls!r}; use it as @register_node or register_node(cls)"
        )
    if (flatten is None) != (unflatten is None):
        raise TypeError(
            f"register_node({cls.__name__}): flatten and unflatten go together; pass both or "
            "neither"
        )
    if flatten is None and issubclass(cls, torch.Tensor):
        raise TypeError(
            f"register_node({cls.__name__}): it is a class of tensors; use pinstage.register_tensor"
        )
    if flatten is None and not has_attributes_only(cls):
        raise TypeError(
            f"register_node({cls.__name__}): its base {builtin_base(cls).__name__} keeps data "
            "outside its attributes; pass flatten and unflatten"
        )
    how = flatten, unflatten
    if _is_container_otherwise(cls, how):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is already registered in another way, or was met "
            "in a batch before; register it once, before its first batch"
        )
    if cls not in REGISTERED:
        REGISTERED[cls] = how
        _tell_of_pinning(cls)
        _forget_leaves(cls)
    return cls


def _is_container_otherwise(cls: type, how: Any) -> bool:
    """Return whether a class is registered in another way, or is a container without being
    registered.
    """
    if cls in REGISTERED:
        return bool(REGISTERED[cls] != how)
    return cls in (*_BUILTIN, list, tuple) or HANDLERS.get(cls) is not None


def register_tensor(cls: type[T], rebuild: Rebuild | None = None) -> type[T]:
    """Make a subclass of `torch.Tensor` known, so that its tensors are packed with the rest. Also a
    class decorator.

    Its memory is sent like any tensor's, and the result has the same class. The object's
    ``__dict__`` stays on the host and is returned unchanged. A class that wraps other tensors needs
    ``__tensor_flatten__`` and ``__tensor_unflatten__``, as for torch's compiler. Subclasses are
    registered too. Tensors that require grad move by their own ``.to()``.

    Args:
        cls: the class.
        rebuild: makes the staged object from the plain tensor and a dict of the attributes. None
            makes an object of the same class with the same attributes. Not for a class with
            ``__tensor_flatten__``.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not a subclass of `torch.Tensor`, or is `torch.nn.Parameter` or a
            subclass of it.
        ValueError: it was registered already, with another `rebuild`.
    """
    given: Any = cls
    if not (isinstance(given, type) and issubclass(given, torch.Tensor)) or given is torch.Tensor:
        raise TypeError(
            f"register_tensor needs a subclass of torch.Tensor: {cls!r}; register_node takes "
            "containers"
        )
    if issubclass(cls, torch.nn.Parameter):
        raise TypeError(
            f"register_tensor({cls.__name__}): parameters are not packed; they move by their own "
            ".to()"
        )
    if REBUILDS.get(cls, rebuild) is not rebuild or cls in REGISTERED:
        raise ValueError(
            f"register_tensor({cls.__name__}): it is already registered in another way"
        )
    REBUILDS[cls] = rebuild
    _forget_leaves(cls)
    return cls


def _forget_leaves(cls: type) -> None:
    """Forget a class and its subclasses that were met as leaves, so that they are looked up
    again.
    """
    for known, handler in HANDLERS.copy().items():
        if handler is None and issubclass(known, cls):
            HANDLERS.pop(known, None)


def _tell_of_pinning(cls: type) -> None:
    """Warn, once, if a class has a method of its own that ``pin_memory=True`` would call."""
    method = getattr(cls, "pin_memory", None)
    if not callable(method) or is_of_library(getattr(method, "__module__", None) or cls.__module__):
        return
    if torch.utils.data.get_worker_info() is None:  # only the main process warns
        warn_once(
            f"{cls.__module__}.{cls.__qualname__}.pin_memory() is not called: pinstage packs the "
            "tensors of a batch into page-locked memory of its own; do the rest of the method's "
            "work elsewhere"
        )


def moves_as_a_whole(cls: type) -> bool:
    """Return whether objects of a class that isn't a container go to a device by their own
    ``.to(device)``.

    This is the convention of Lightning and Accelerate. Modules don't count: their ``.to()`` changes
    the module.
    """
    return callable(getattr(cls, "to", None)) and (
        not issubclass(cls, torch.nn.Module) or moves_in_silence(cls)
    )


def moves_in_silence(cls: type) -> bool:
    """Return whether objects of a class are known to move as a whole, so that no warning is
    needed.
    """
    return library_functions(cls) is False


# -- the table -------------------------------------------------------------------------------------


class _Handlers(dict[type, Any]):
    """The handler of each class, looked up when it is first met; see ``structure_of`` in
    ``_native/structure.c``.
    """

    def __missing__(self, cls: type) -> Any:
        before = len(REGISTERED) + len(REBUILDS)
        self[cls] = handler = _find(cls)
        # Another thread may have registered it meanwhile.
        if len(REGISTERED) + len(REBUILDS) > before:
            self.pop(cls, None)
        return handler


HANDLERS = _Handlers()


def forget_classes() -> None:
    """Forget the classes that were met, if there are too many. Called before a walk, because one
    walk may meet as many.

    Existing structures stay usable: they hold their handlers.
    """
    if max(len(HANDLERS), len(IS_ATOM)) > MOST_CLASSES:
        HANDLERS.clear()
        ATOM_TYPES.clear()  # before `IS_ATOM`: its types aren't added to `ATOM_TYPES` again
        IS_ATOM.clear()


def is_container(cls: type, *, look_again: bool = False) -> bool:
    """Return whether the table has a handler for a class.

    Args:
        cls: the class.
        look_again: whether a class that was met as a leaf is looked up again: it may have been
            registered with torch's pytree since.
    """
    if look_again:
        HANDLERS.pop(cls, None)
    return HANDLERS[cls] is not None


def _find(cls: Any) -> Any:
    """Return the handler of a class; None for a leaf.

    The first that applies: Python's and torch's own containers; registration; types that hold no
    tensor; the class's library; registered tensors; the protocol; named tuples; attributes; torch's
    pytree.
    """
    if cls in _BUILTIN:
        return _BUILTIN[cls]
    how = REGISTERED.get(cls)
    if how is not None:
        return _of_functions(cls, *how)
    if is_atom(cls):
        return None
    functions = library_functions(cls)
    if functions is not None:
        return None if isinstance(functions, bool) else _of_functions(cls, *functions)
    if issubclass(cls, torch.Tensor):
        return tensor_handler(cls)
    handler = (
        _protocol_handler(cls)
        or _sequence_handler(cls)
        or _object_handler(cls)
        or pytree_handler(cls)
    )
    if handler is not None:
        _tell_of_pinning(cls)
    return handler


def _of_functions(cls: type, flatten: Flatten | None, unflatten: Any) -> Any:
    """Return the handler of functions that take arguments in the order of torch's pytree; without
    functions, that of an object with attributes.
    """
    if flatten is None:
        return attribute_handler(cls)
    return checked(cls, flatten, lambda context, children: unflatten(children, context))


def _protocol_handler(cls: Any) -> Any:
    """Return the handler of a `StagingNode`; None for other classes."""
    own: Any = getattr(cls, "tree_flatten", None), getattr(cls, "tree_unflatten", None)
    return checked(cls, *own) if all(map(callable, own)) else None


def _object_handler(cls: Any) -> Any:
    """Return how an object is taken apart whose content is its attributes and items; None for other
    classes.
    """
    by_attributes = _by_attributes()
    plain = (dict, list, tuple, UserDict, UserList, *by_attributes)
    is_data = dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")
    if not (is_data or issubclass(cls, plain)) or not has_attributes_only(cls):
        return None
    return attribute_handler(cls, None if issubclass(cls, by_attributes) else _stays_the_same)


def _stays_the_same(obj: Any) -> bool:
    """Return whether a staged batch has an object as it is, although the object may change."""
    return (
        not isinstance(obj, torch.Tensor | np.ndarray)
        and not is_atom(type(obj))
        and not is_container(type(obj))
    )


def _by_attributes() -> tuple[type, ...]:
    return tuple(cls for cls, how in REGISTERED.copy().items() if how == _BY_ATTRIBUTES)


def registration_of(cls: Any) -> Callable[[Any], Any] | None:
    """Return the function that registers a class in another process, given the class alone; None if
    there is none.
    """
    if issubclass(cls, _by_attributes()):
        return register_node
    return register_tensor if issubclass(cls, torch.Tensor) and rebuild_of(cls) is None else None
