"""Classes of other libraries, and the modules that take them apart.

A library is recognised by the module of a class or of one of its bases. Its integration module is
imported when one of its classes is first met, never before. That module has a function
``nodes(cls)``, which returns ``(flatten, unflatten)`` as `register_node` takes them, False for a
class that moves as a whole by its own ``.to()``, or None. It may also call `register_tensor` and
`register_node`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from itertools import chain
from typing import Any

from .._compat.calls import pytree_functions
from .._compat.probes import warn_once
from ._handler import Flatten, Handler, Unflatten
from ._leaves import OnHost

GROUP = "pinstage.nodes"
"""The group of entry points for integrations in other packages. An entry point has the name of the
library.
"""

_SHIPPED = {
    "monai": "_monai",
    "pydantic": "_pydantic",
    "tensordict": "_tensordict",
    "torch.distributed.tensor": "_dtensor",
    "torch_geometric": "_torch_geometric",
    "torchrec": "_torchrec",
    "torchvision": "_torchvision",
    "transformers": "_transformers",
}
"""The modules of `pinstage.integrations`, by package. Integrations in other packages aren't listed
here.
"""

Nodes = Callable[[type], Any]


def library_functions(cls: type) -> tuple[Flatten, Unflatten] | bool | None:
    """Return how a class of a library is taken apart; False if it moves as a whole; None if no
    library knows it.
    """
    modules = dict.fromkeys(base.__module__ for base in cls.__mro__)
    for nodes in dict.fromkeys(chain.from_iterable(map(_that_know, modules))):
        functions: tuple[Flatten, Unflatten] | bool | None = nodes(cls)
        if functions is not None:
            return functions
    return None


def is_of_library(module: str) -> bool:
    """Return whether a module belongs to torch, or to a library that has an integration."""
    return module.partition(".")[0] == "torch" or any(_that_know(module))


def _that_know(package: str) -> Iterator[Nodes]:
    while package:
        nodes = _nodes_of(package)
        if nodes is not None:
            yield nodes
        package = package.rpartition(".")[0]


@cache
def _nodes_of(package: str) -> Nodes | None:
    """Return the function ``nodes`` for a package's classes; None if there is none."""
    try:
        if package in _others():
            nodes: Any = _others()[package].load()
        elif package in _SHIPPED:
            nodes = importlib.import_module(f"pinstage.integrations.{_SHIPPED[package]}").nodes
        else:
            return None
    except Exception as error:  # noqa: BLE001 - any version of that library may raise anything
        warn_once(
            f"classes of {package} are not recognised: {error!r}; register them with "
            "pinstage.register_node"
        )
        return None
    return nodes  # type: ignore[no-any-return]


@cache
def _others() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def pytree_handler(cls: type) -> Handler | None:
    """Return a handler of torch's pytree for a class; None if it has none. Its context stays on the
    host.
    """
    functions = pytree_functions(cls)
    if functions is None:
        return None
    take_apart, put_together = functions

    def flatten(obj: Any) -> tuple[Any, Any]:
        children, context = take_apart(obj)
        return (*children, OnHost(context)), None

    return Handler(flatten, lambda _, children: put_together(list(children[:-1]), children[-1]))
