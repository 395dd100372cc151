"""The batch that ``pinstage audit module:callable`` is about."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from .._errors import TargetError


def first_batch(target: str) -> Any:
    """Import a module, call a function of it without arguments, and return the batch that it gives.

    Args:
        target: ``"module:callable"``, the module by its dotted name or as ``path/to/file.py``. The callable returns a
            batch, or a DataLoader or other iterable of batches, whose first one is taken. What is no callable is taken
            as it is.

    Raises:
        TargetError: there is no such thing, it raises, or it yields nothing.
    """
    module_name, separator, name = target.rpartition(":")
    if not separator or not module_name or not name:
        raise TargetError(
            f"not module:callable: {target!r}; write for example train:make_loader, or train.py:make_loader"
        )
    thing: Any = _import(module_name)
    for part in name.split("."):
        if not hasattr(thing, part):
            raise TargetError(f"{module_name} has no {name!r}; {_offer(thing)}")
        thing = getattr(thing, part)
    try:
        made = thing() if callable(thing) and not isinstance(thing, DataLoader) else thing
        return _first(made, target)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{target} raised {type(error).__name__}: {error}") from error


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        return _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"no module {name!r} in {here} or installed; name it as Python would import it"
            ) from error
        raise TargetError(f"importing {name} failed: {error}") from error
    except Exception as error:
        raise TargetError(f"importing {name} raised {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _first(made: Any, target: str) -> Any:
    if not _yields_batches(made):
        return made
    nothing = object()
    batch = next(iter(made), nothing)
    if batch is nothing:
        raise TargetError(f"{target} gives an empty {type(made).__name__}; there is no batch to look at")
    return batch


def _yields_batches(made: Any) -> bool:
    """Whether this is something that batches come out of, and no batch itself."""
    if isinstance(made, DataLoader | Iterator):
        return True
    batches = (torch.Tensor, np.ndarray, Mapping, Sequence, Set)
    return not isinstance(made, batches) and hasattr(made, "__iter__")


def _offer(thing: Any) -> str:
    public = [name for name, value in vars(thing).items() if callable(value) and not name.startswith("_")]
    return f"it has {', '.join(public[:8])}" if public else "it has no functions"
