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

KIB, MIB = 1 << 10, 1 << 20
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
    """A number of float32 leaves of one size."""

    leaves: int
    leaf_bytes: int
    ragged: bool = False
    """Whether leaves have 0.5 to 1.5 times this size, drawn for each batch."""
    in_place: bool = False
    """Whether the leaves are written directly into page-locked memory, so that nothing has to be
    packed.
    """
    mixed: bool = False
    """Whether leaves have three dtypes in turn, all with random bytes."""

    @property
    def id(self) -> str:
        """The name in result files: `1000x256B`, `1000x256B-ragged`, `1x512MiB-in-place`,
        `16x64KiB-mixed`.
        """
        size, unit = self.leaf_bytes, "B"
        for factor, name in ((MIB, "MiB"), (KIB, "KiB")):
            if self.leaf_bytes % factor == 0:
                size, unit = self.leaf_bytes // factor, name
                break
        kinds = "-ragged" * self.ragged + "-in-place" * self.in_place + "-mixed" * self.mixed
        return f"{self.leaves}x{size}{unit}{kinds}"

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


SHAPES = (
    BatchShape(1, 5 * KIB),
    BatchShape(1, 588 * KIB),
    BatchShape(2, 196 * KIB),
    BatchShape(3, 32 * KIB),
    BatchShape(4, 256 * KIB),
    BatchShape(6, 100 * KIB),
    BatchShape(10, KIB),
    BatchShape(16, KIB),
    BatchShape(16, 64 * KIB, mixed=True),
    BatchShape(4, KIB),
    BatchShape(4, KIB, ragged=True),
    BatchShape(64, KIB),
    BatchShape(64, KIB, ragged=True),
    BatchShape(528, 284),
    BatchShape(1000, 256),
    BatchShape(1000, 256, ragged=True),
    BatchShape(10_000, 512),
    BatchShape(10_000, 512, ragged=True),
    BatchShape(1000, 16 * KIB),
    BatchShape(1000, 16 * KIB, ragged=True),
    BatchShape(8, 256 * KIB),
    BatchShape(8, MIB),
    BatchShape(1, 38 * MIB),
    BatchShape(16, 16 * MIB),
    BatchShape(1000, 256 * KIB),
    BatchShape(64, MIB),
    BatchShape(300, MIB),
    BatchShape(1, 512 * MIB),
    BatchShape(1, 512 * MIB, in_place=True),
)
SERIES = {
    "leaves": tuple(
        BatchShape(leaves, 256) for leaves in (10, 32, 100, 316, 1000, 3162, 10_000, 31_623)
    ),
    "bytes": tuple(BatchShape(16, 4**power) for power in range(3, 14)),
}
"""Shapes that differ in one thing, to see how cost grows with it: the number of leaves, and the
size of 16 of them.
"""
SMOKE_SHAPES = (
    BatchShape(16, KIB),
    BatchShape(33, 284, ragged=True),
    BatchShape(3, 256 * KIB),
    BatchShape(9, 5 * KIB, mixed=True),
    BatchShape(1, 64 * KIB, in_place=True),
)
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
    if shape.ragged:
        sizes = rng.integers(sizes // 2, sizes * 3 // 2, endpoint=True)
    batch: Batch = {}
    for leaf in range(shape.leaves):
        stream, field = divmod(leaf, len(FIELDS))
        sample, stream = divmod(stream, STREAMS_PER_SAMPLE)
        tensor = torch.empty(int(sizes[leaf]), dtype=torch.float32)
        rng.random(dtype=np.float32, out=tensor.numpy())
        streams = batch.setdefault(f"sample_{sample:04d}", {})
        dtype = DTYPES[leaf % len(DTYPES)] if shape.mixed else torch.float32
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
