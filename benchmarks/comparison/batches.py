"""The batch shapes that every variant stages, from many tiny leaves to a few large ones.

A batch is a dict of samples, each a dict of streams, each a dict of float32 tensors. It has only
dicts, since a TensorDict has no lists, and all rivals take such a batch directly. All leaves of a
shape have one size, so the figures read as cost per leaf or as bandwidth; leaves of a ragged shape
have 0.5 to 1.5 times the size, drawn for each batch. Leaves of a mixed shape have three dtypes.
Content is random and differs for each leaf, so that a misplaced leaf is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DTYPES = (torch.float32, torch.int64, torch.uint8)
FIELDS = ("values", "times", "position", "extra")
STREAMS_PER_SAMPLE = 2

# Instances of a shape are rotated, so that the source of a call isn't in a cache from the last
# call.
ROTATED_BYTES = 128 * MIB
FEWEST_INSTANCES, MOST_INSTANCES = 3, 16
MOST_LEAVES = 200_000  # of all instances: a million tensors would take longer to make than to stage

Batch = dict[str, Any]


@dataclass(frozen=True)
class BatchShape:
    """A number of float32 leaves of one size.

    Attributes:
        id: tensors x bytes of each: `1000x256B`, `1x512MiB`; with `-ragged`, leaves have 0.5 to 1.5
            times this size, drawn for each batch; with `-mixed`, three dtypes in turn, all with
            random bytes; with `-in-place`, they are written directly into page-locked memory, so
            that nothing has to be packed.
    """

    id: str

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return int(self.id.partition("x")[0])

    @property
    def leaf_bytes(self) -> int:
        """Bytes of a leaf."""
        size = self.id.partition("x")[2].partition("-")[0]
        number = size.rstrip("BKMi")
        return int(number) * {"B": 1, "KiB": KIB, "MiB": MIB}[size.removeprefix(number)]

    @property
    def kind(self) -> str:
        """`ragged`, `mixed`, `in-place` or nothing."""
        return self.id.partition("-")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of one batch, approximate if it is ragged."""
        return self.leaves * self.leaf_bytes

    @property
    def instances(self) -> int:
        """Number of distinct batches in rotation."""
        return max(
            FEWEST_INSTANCES,
            min(MOST_INSTANCES, ROTATED_BYTES // self.nbytes, MOST_LEAVES // self.leaves),
        )


def shapes(ids: str) -> tuple[BatchShape, ...]:
    """Return the shapes with these ids."""
    return tuple(map(BatchShape, ids.split()))


SHAPES = shapes("""
    1x5KiB 1x588KiB 2x196KiB 3x32KiB 4x256KiB 6x100KiB 10x1KiB 16x1KiB 16x64KiB-mixed
    4x1KiB 4x1KiB-ragged 64x1KiB 64x1KiB-ragged 528x284B 1000x256B 1000x256B-ragged
    10000x512B 10000x512B-ragged 1000x16KiB 1000x16KiB-ragged
    8x256KiB 8x1MiB 1x38MiB 16x16MiB 1000x256KiB 64x1MiB 300x1MiB 1x512MiB 1x512MiB-in-place
""")
SERIES = {
    "leaves": shapes("10x256B 32x256B 100x256B 316x256B 1000x256B 3162x256B 10000x256B 31623x256B"),
    "bytes": shapes("""
        16x64B 16x256B 16x1KiB 16x4KiB 16x16KiB 16x64KiB 16x256KiB 16x1MiB 16x4MiB 16x16MiB
        16x64MiB
    """),
}
"""Shapes that differ in one thing, to see how cost grows with it: the number of leaves, and the
size of 16 of them.
"""
SMOKE_SHAPES = shapes("16x1KiB 33x284B-ragged 3x256KiB 9x5KiB-mixed 1x64KiB-in-place")
SMOKE_POINTS = 3
"""Number of small shapes at the start of each series."""


def every_shape() -> list[BatchShape]:
    """Return all shapes of this module, each once."""
    return list(
        dict.fromkeys(
            [*SHAPES, *SMOKE_SHAPES, *(shape for series in SERIES.values() for shape in series)]
        )
    )


def build(shape: BatchShape, seed: int) -> Batch:
    """Return one nested batch of random float32 leaves, the same for the same seed."""
    rng = np.random.Generator(np.random.SFC64(seed))
    sizes = np.full(shape.leaves, shape.leaf_bytes // 4)
    if shape.kind == "ragged":
        sizes = rng.integers(sizes // 2, sizes * 3 // 2, endpoint=True)
    batch: Batch = {}
    for leaf in range(shape.leaves):
        stream, field = divmod(leaf, len(FIELDS))
        sample, stream = divmod(stream, STREAMS_PER_SAMPLE)
        tensor = torch.empty(int(sizes[leaf]), dtype=torch.float32)
        rng.random(dtype=np.float32, out=tensor.numpy())
        streams = batch.setdefault(f"sample_{sample:04d}", {})
        dtype = DTYPES[leaf % len(DTYPES)] if shape.kind == "mixed" else torch.float32
        streams.setdefault(f"stream_{stream}", {})[FIELDS[field]] = tensor.view(dtype)
    return batch


def build_instances(shape: BatchShape) -> list[Batch]:
    """Return the distinct batches of a shape."""
    return [build(shape, seed) for seed in range(shape.instances)]


def map_leaves(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch of the same structure with `move` applied to each leaf."""
    return {
        key: map_leaves(value, move) if isinstance(value, dict) else move(value)
        for key, value in batch.items()
    }


def differences(batch: Batch, staged: Any, device: torch.device, path: str = "") -> Iterator[str]:
    """Yield a line for each leaf of `staged` that is not the leaf of `batch` of that name, bit for
    bit, on `device`.
    """
    if len(batch) != len(staged.keys()):
        yield f"{path or 'batch'}: {len(staged.keys())} entries instead of {len(batch)}"
    for key, value in batch.items():
        here = f"{path}/{key}" if path else key
        other = staged[key]
        if isinstance(value, dict):
            yield from differences(value, other, device, here)
        elif not isinstance(other, torch.Tensor) or other.device != device:
            yield f"{here}: not a tensor on {device}"
        elif other.dtype != value.dtype or other.shape != value.shape:
            yield (
                f"{here}: {other.dtype} {tuple(other.shape)} instead of {value.dtype} "
                f"{tuple(value.shape)}"
            )
        elif not torch.equal(_bytes(other), _bytes(value)):
            yield f"{here}: other bytes"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
