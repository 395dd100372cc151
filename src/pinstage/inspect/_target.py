"""The TARGET of ``pinstage audit``: a module, and a callable in it that returns a batch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset

from ..errors import TargetError


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """Redirect the output of a target, including its workers and its C code, to stderr: stdout is
    for findings.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class First(NamedTuple):
    """The first batch of a target."""

    batch: Any
    advice: str
    """A line about the dataset of its loader; empty if there is nothing to say."""


def first_batch(target: str) -> First:
    """Import a module, call one of its functions without arguments, and return the batch that it
    makes.

    The module is given by its dotted name or as ``path/to/file.py``. The callable returns a batch,
    or a DataLoader or other iterable of batches, of which the first is taken. An object that isn't
    callable is used like a result.

    Raises:
        TargetError: the module or the function can't be found, raises an error, or returns or
            yields nothing.
    """
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise TargetError(
            f"not module:callable: {target!r}; write for example train:make_loader, or "
            "train.py:make_loader"
        )
    thing = _object_in(_import(module_name), name, module_name)
    try:
        made = thing() if callable(thing) and not isinstance(thing, DataLoader) else thing
        for batch in _batches_of(made):
            return First(batch, _advice(made))
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} raised {type(error).__name__}: {error}") from error
    if made is None:
        raise TargetError(
            f"{target} returns None; end it with `return` and a batch, or a loader of batches"
        )
    kind = type(made).__name__
    raise TargetError(f"{target} returns an empty {kind}; there is no batch to look at")


def _advice(made: Any) -> str:
    dataset = type(getattr(made, "dataset", None))
    if type(made) is not DataLoader or dataset not in (TensorDataset, StackDataset, Subset):
        return ""
    return (
        f"dataset: torch's loader reads a {dataset.__name__} sample by sample; if it is tensors in "
        "memory, ps.DataLoader without workers gathers their rows"
    )


def _object_in(module: ModuleType, name: str, module_name: str) -> Any:
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            contents = getattr(thing, "__dict__", {}).items()
            names = (key for key, value in contents if callable(value))
            public = [key for key in names if not key.startswith("_")][:8]
            raise TargetError(
                f"{module_name} has no {name!r}; it has {', '.join(public) or 'no functions'}"
            )
        thing = getattr(thing, part)
    return thing


def _batches_of(made: Any) -> Iterable[Any]:
    """Return a result as an iterable of batches: itself, unless it is a batch, or None.

    Batches of some libraries, such as PyG, can be iterated, too. They have a ``to()``.
    """
    if made is None:
        return ()
    is_batch = isinstance(made, np.ndarray | Mapping | Sequence | Set) or hasattr(made, "to")
    return [made] if is_batch or not hasattr(made, "__iter__") else made


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name)
        # Never None for a .py file.
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look up a class's module
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"cannot import {name}, from {here}: {type(error).__name__}: {error}"
        ) from error
