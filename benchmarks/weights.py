"""Weights from a safetensors file to the device: 8 GB in 300 tensors, until all are there.

    python benchmarks/weights.py --out benchmarks/results/weights.json

| case | sample |
|---|---|
| `cold` | after the file was dropped from the page cache; one sample, with the first use of everything |
| `warm` | the file is in the page cache |

`bus` copies as many bytes from memory that is already page-locked. Weights are compared with the
file outside the timer, bit for bit. The file is written to --folder (by default the system's
temporary one) and removed at the end.

fastsafetensors and Run:ai's Model Streamer read with O_DIRECT where the host and the file system
allow it, so their warm samples may come from the disk, too. The ways whose ids end in `_buffered` make them read through the page cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comparison import Args, Incorrect, Outcome, Program, Variant, bus, timed

SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """Whether the file is cached, and its contents."""

    id: str
    tensors: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.tensors * self.rows * self.columns * 2


CASES = tuple(Case(name, 300, 3256, 4096) for name in ("cold", "warm"))
SMALL_CASES = tuple(Case(case.id, 5, 24, 64) for case in CASES)


def write(path: Path, case: Case) -> None:
    """Write the file without the library: a length, the offsets as JSON, and the bytes."""
    each = case.rows * case.columns * 2
    places = {
        f"{number}.weight": {
            "dtype": "BF16",
            "shape": [case.rows, case.columns],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(case.tensors)
    }
    head = json.dumps(places).encode()
    head += b" " * (-len(head) % 8)
    base = torch.randn(
        case.rows, case.columns, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16
    )
    rows = base.view(torch.uint8).numpy()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for number in range(case.tensors):  # each has a different first row
            file.write(rows[number % case.rows :].data)
            file.write(rows[: number % case.rows].data)
        file.flush()
        os.fsync(file.fileno())  # what isn't written can't be dropped


def drop(path: Path) -> None:
    """Drop the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def mapped(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the file's tensors, as views of its mapping."""
    whole = np.memmap(path, mode="c")  # private: torch warns about read-only arrays
    size = int.from_bytes(whole[:8].tobytes(), "little")
    for name, place in json.loads(whole[8 : 8 + size].tobytes()).items():
        begin, end = (8 + size + offset for offset in place["data_offsets"])
        yield name, torch.from_numpy(whole[begin:end]).view(torch.bfloat16).view(place["shape"])


def model_of(case: Case, device: torch.device | str) -> torch.nn.ModuleList:
    """Return a model whose weights have the file's names and shapes."""
    layers = [
        torch.nn.Linear(case.columns, case.rows, bias=False, dtype=torch.bfloat16, device="meta")
        for _ in range(case.tensors)
    ]
    return torch.nn.ModuleList(layers).to_empty(device=device).requires_grad_(False)


# -- the ways: a call that loads, and returns the tensors by name ----------------------

Load = Callable[[], dict[str, torch.Tensor]]


def _safetensors(path: Path, case: Case, device: torch.device, *, way: str) -> Load:
    from safetensors.torch import load_file

    model = model_of(case, device) if way == "load_state_dict" else None

    def load() -> dict[str, torch.Tensor]:
        if way == "load_file":
            return load_file(path, device=str(device))
        into = model or model_of(case, "meta")
        into.load_state_dict(load_file(path), assign=model is None)
        return into.to(device).state_dict()

    return load


@contextmanager
def _pinstage(
    path: Path, case: Case, device: torch.device, *, load_into: Callable[..., None]
) -> Iterator[Load]:
    import pinstage as ps

    model = model_of(case, device)
    with ps.Stager(device, max_bytes="1GiB") as stager:

        def load() -> dict[str, torch.Tensor]:
            load_into(stager, model, path)
            return model.state_dict()

        yield load


def _pairs(stager: Any, model: torch.nn.Module, path: Path) -> None:
    stager.load_weights(model, mapped(path))


def _file(stager: Any, model: torch.nn.Module, path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stager.load_weights(model, file)


def _each(stager: Any, model: torch.nn.Module, path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name, parameter in model.named_parameters():
            parameter.copy_(stager.to_device(file.get_tensor(name)))


def _streamed(stager: Any, model: torch.nn.Module, path: Path) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        stager.load_weights(model, streamer.get_tensors())


def _buffered(setup: Callable[..., Any], *given: Any) -> Any:
    """Set a way up whose package reads through the page cache. It reads its environment variable
    when it is imported, and each way has a process of its own.
    """
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    os.environ["RUNAI_STREAMER_FS_STRATEGY"] = "io_uring_buffered,sync_buffered"
    return setup(*given)


def _fastsafetensors(path: Path, case: Case, device: torch.device) -> Load:  # noqa: ARG001
    from fastsafetensors import fastsafe_open

    def load() -> dict[str, torch.Tensor]:
        # As documented: the tensors are views of one buffer on the device, and outlive the block.
        with fastsafe_open(filenames=[str(path)], nogds=True, device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    return load


def _streamer(path: Path, case: Case, device: torch.device) -> Load:  # noqa: ARG001
    from runai_model_streamer import SafetensorsStreamer

    def load() -> dict[str, torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path), device=str(device))
            return dict(streamer.get_tensors())

    return load


_pinstage_streamer = partial(_pinstage, load_into=_streamed)
_ST, _FAST, _STREAMER = "safetensors", "fastsafetensors", "runai_model_streamer"
VARIANTS = (
    Variant(
        "load_file",
        partial(_safetensors, way="load_file"),
        '`load_file(path, device="cuda")`',
        package=_ST,
    ),
    Variant(
        "load_state_dict",
        partial(_safetensors, way="load_state_dict"),
        "`model.load_state_dict(load_file(path))`",
        package=_ST,
    ),
    Variant(
        "model_to",
        partial(_safetensors, way="model_to"),
        '`load_state_dict(..., assign=True)`, `model.to("cuda")`',
        package=_ST,
    ),
    Variant(
        "fastsafetensors",
        _fastsafetensors,
        "fastsafetensors' `fastsafe_open([path], nogds=True)`, its tensors as they are",
        package=_FAST,
    ),
    Variant(
        "fastsafetensors_buffered",
        partial(_buffered, _fastsafetensors),
        "with `FASTSAFETENSORS_ODIRECT=0`",
        package=_FAST,
    ),
    Variant(
        "streamer",
        _streamer,
        "Run:ai's `SafetensorsStreamer`, `device=`",
        package=_STREAMER,
    ),
    Variant(
        "streamer_buffered",
        partial(_buffered, _streamer),
        "with `RUNAI_STREAMER_FS_STRATEGY=io_uring_buffered,sync_buffered`",
        package=_STREAMER,
    ),
    Variant(
        "bus",
        lambda _, case, device: bus(device, case.nbytes)[0],
        "one page-locked buffer of 256 MiB, copies only",
    ),
    Variant(
        "pinstage_each",
        partial(_pinstage, load_into=_each),
        "`to_device` and `copy_`, one by one",
        package=_ST,
        ours=True,
    ),
    Variant(
        "pinstage",
        partial(_pinstage, load_into=_file),
        "`stager.load_weights(model, file)`",
        package=_ST,
        ours=True,
    ),
    Variant(
        "pinstage_pairs",
        partial(_pinstage, load_into=_pairs),
        "with pairs of a mapped file",
        ours=True,
    ),
    Variant(
        "pinstage_streamer",
        _pinstage_streamer,
        "`stager.load_weights(model, streamer.get_tensors())`",
        package=_STREAMER,
        ours=True,
    ),
    Variant(
        "pinstage_streamer_buffered",
        partial(_buffered, _pinstage_streamer),
        "with the streamer's buffered strategies",
        package=_STREAMER,
        ours=True,
    ),
)


def measure(variant: Variant, args: Args, case: Case) -> dict[str, Outcome]:
    """Return the first sample, and the later ones."""
    path = Path(args.file)

    def check(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in mapped(path) if variant.id != "bus" else ():
            if not torch.equal(weights[name], tensor.to(args.device)):
                raise Incorrect(f"{name} differs")

    with torch.no_grad(), variant.open(path, case, args.device) as load:
        drop(path)
        loads = partial(timed, load, args.device, warm_ups=0, check=check)
        cold = loads(repeats=1)
        return {"cold": cold, "warm": loads(repeats=args.repeats, fewest=2, seconds=SECONDS)}


@contextmanager
def file_of(args: Args) -> Iterator[None]:
    """Write the file, and remove it at the end."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.file = str(Path(folder) / "weights.safetensors")
        write(Path(args.file), PROGRAM.chosen_cases(args)[0])
        yield


PROGRAM = Program.of(
    globals(),
    title="ms until all weights are on the device",
    at_once=True,
    options={
        "repeats": (5, "warm samples for each variant"),
        "folder": (None, "folder for the file, on a local disk"),
    },
    limits=("bus",),
    around=file_of,
)
PROGRAM.run(__name__)
