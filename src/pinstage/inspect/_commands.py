"""The commands ``pinstage audit``, ``doctor`` and ``trace``, behind their options.

Findings go to stdout: tables on a terminal, plain text elsewhere, or JSON. Everything else goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ._audit import audit
from ._bus import Bus
from ._cost import keep
from ._errors import InspectError, TargetError
from ._report import say, show

EXAMPLE = Path(__file__).with_name("example.json.gz")


def run_audit(target: str, *, bus: str | None, as_json: bool, every_leaf: bool) -> int:
    """Audit the first batch of a target; return the exit status."""
    figures = None if bus is None else Bus.parse(bus)
    with _prints_on_stderr():
        found = audit(first_batch(target), bus=figures)
    show(found.to_dict() if as_json else found._sections(every_leaf=every_leaf))
    return 0


def run_doctor(*, device: str | None, measuring: bool, plot: Path | None, as_json: bool) -> int:
    """Check this machine; return the exit status: 1 if anything is a problem."""
    from ._doctor import diagnose
    from ._plot import save_plot

    index = None if device is None else _device_index(device)
    if plot is not None:
        importlib.import_module("matplotlib")  # if it is missing, say so before seconds are spent on measuring
    if measuring and torch.cuda.is_available():
        say("measuring copies, which takes some seconds", only_on_terminal=True)
    diagnosis = diagnose(device=index, measuring=measuring)
    show(diagnosis.to_dict() if as_json else diagnosis.sections())
    measured = diagnosis.measured
    if measured is not None and measured.cost is not None:
        try:
            say(f"kept for pinstage trace: {keep(measured.gpu.name, measured.cost)}")
        except (OSError, RuntimeError) as error:  # no home directory, say
            say(f"not kept, so pinstage trace takes the reference: {error}")
    if plot is not None:
        if measured is None:
            raise InspectError(f"nothing was measured, so {plot} is not drawn; that takes a GPU, and no --no-measure")
        save_plot(measured.points, plot, title=measured.gpu.name, link_rate=measured.gpu.link_rate)
        say(f"written: {plot}")
    return int(diagnosis.has_problem)


def run_trace(path: Path | None, *, bus: str | None, as_json: bool, step_ms: float | None) -> int:
    """Read a trace, None for the one that is shipped; return the exit status."""
    from ._trace import trace_report

    path = EXAMPLE if path is None else path
    if step_ms is not None and not step_ms > 0:
        raise InspectError(f"--step-ms must be above zero: {step_ms:g}; milliseconds of a step without the profiler")
    say(f"reading {path.name}", only_on_terminal=True)
    seconds = None if step_ms is None else step_ms / 1e3
    report = trace_report(path, bus=None if bus is None else Bus.parse(bus), step_seconds=seconds)
    show(report.to_dict() if as_json else report.sections())
    return 0


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """Send what a target prints, its workers and its C code included, to stderr: stdout is for findings."""
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


def _device_index(device: str) -> int:
    name, _, index = device.partition(":")
    if name != "cuda" or not (index or "0").isdecimal():
        raise InspectError(f"not a CUDA device: {device!r}; write cuda or cuda:1")
    return int(index or 0)


# -- module:callable ---------------------------------------------------------------------------------------------------


def first_batch(target: str) -> Any:
    """Import a module, call a function of it without arguments, and return the batch that it gives.

    The module is named by its dotted name or as ``path/to/file.py``. The callable returns a batch, or a DataLoader or
    other iterable of batches, whose first one is taken. What is no callable is taken as it is.

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
