"""Many random batches, in a separate process: ``python soak.py COUNT [SEED]``.

Each goes through a `Stager` for the CPU, and its sources are overwritten as soon as `stage()` has
returned. The staged batch must have the earlier values, also while later batches are staged. Prints
the number of wrong batches, and what the process held in the first and in the second half.
"""

import collections
import dataclasses
import gc
import json
import mmap
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bitwise
import numpy as np
import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map_only

import pinstage as ps

DTYPES = (
    torch.uint8, torch.int8, torch.bool, torch.int16, torch.uint16, torch.bfloat16, torch.float16,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e5m2,
)  # fmt: skip
OF_NUMPY = (torch.int32, torch.float32, torch.float64, torch.uint8, torch.int16)
FORMS = (
    torch.t,
    lambda tensor: tensor[:, ::2],
    lambda tensor: tensor[1:],
    lambda tensor: tensor.unsqueeze(1).expand(-1, 2, -1),
)
SAMPLES = 40
"""Number of samples of what the process holds."""

# A finished thread takes a moment to end.
OF_SAMPLES = {"beside_pools": statistics.median, "threads": min}
"""The statistic of each half; the maximum for figures without an entry."""

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


# For the comparisons here: pinstage doesn't ask torch about dataclasses.
register_pytree_node(
    Record, lambda record: (list(vars(record).values()), None), lambda values, _: Record(*values)
)


class Batches:
    """Makes batches; `overwrite` overwrites the sources of the last one.

    Args:
        rng: the source of randomness.
    """

    def __init__(self, rng):
        self._rng = rng
        self._noise = torch.from_numpy(
            np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, 5 << 20, np.uint8)
        )
        self._sources = []

    def make(self):
        self._sources = []
        large = self._rng.random() < 0.005
        tree = {"leaf": self._leaf(1 << 16)} if large else {}
        return tree | {f"field {n}": self._tree(2) for n in range(self._rng.randrange(1, 6))}

    def overwrite(self):
        for source in self._sources:
            source.fill_(0xA5)

    def _tree(self, depth):
        rng = self._rng
        kind = rng.randrange(14 if depth else 7)
        if kind < 6:
            return self._leaf(rng.choice([1, 7, 60, 500]))
        if kind == 6:
            return rng.choice([None, "text", 3, 2.5])
        children = [self._tree(depth - 1) for _ in range(rng.randrange(2, 4))]
        if kind == 7:
            return [*children, children[0]]  # one child twice
        if kind == 8:
            return tuple(children)
        if kind < 11:
            return (Pair, Record)[kind - 9](*children[:2])
        items = zip(rng.sample("abcd", len(children)), children, strict=True)
        return collections.OrderedDict(items) if kind == 11 else dict(items)

    def _leaf(self, rows):
        rng = self._rng
        rows = rng.randrange(rows + 1)
        columns = rng.randrange(1, 5)
        dtype = rng.choice(DTYPES)
        nbytes = rows * columns * dtype.itemsize
        if not nbytes:
            return torch.empty(rows, columns, dtype=dtype)
        start = rng.randrange(self._noise.numel() - nbytes)
        source = self._noise[start : start + nbytes].clone()
        self._sources.append(source)
        tensor = source.view(dtype).view(rows, columns)
        form = rng.randrange(10)
        if form < len(FORMS):
            return FORMS[form](tensor)
        if form == 4 and dtype.is_complex:
            return tensor.conj()
        if form in (5, 6) and dtype in OF_NUMPY:
            return tensor.numpy()[:: -1 if form == 5 else 1]
        return tensor


def mapped(tree, function):
    """Return a tree with `function` applied to tensors and arrays."""
    return tree_map_only((torch.Tensor, np.ndarray), function, tree)


def bits(leaf):
    """Return dtype, shape and bytes."""
    tensor = torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf
    return tensor.dtype, tensor.shape, bitwise.bits(tensor).numpy().tobytes()


def same(one, other):
    """Compare two trees of results of `bits`."""
    return tree_flatten(one) == tree_flatten(other)


def held(pools):
    """Return what the process holds."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    in_pools = sum(pool.stats().held_bytes for pool in pools)
    return {
        "beside_pools": resident - in_pools,
        "in_pools": in_pools,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "objects": len(gc.get_objects()),
    }


def soak(count, seed=0):
    """Stage `count` batches.

    Returns:
        The number of wrong batches, the seconds, and what was held in each half.
    """
    rng = random.Random(seed)
    batches = Batches(rng)
    kept = collections.deque(maxlen=3)  # batches in use: they must not change
    wrong = 0
    halves = [], []
    began = time.monotonic()
    with (
        ps.Stager("cpu", max_bytes="64MiB", pack_threads=3) as fresh,
        ps.Stager("cpu", max_bytes="64MiB", pack_threads=3, own_storage=False) as plain,
    ):
        for number in range(count):
            batch = batches.make()
            expected = mapped(batch, bits)
            stager = rng.choice([fresh, plain])
            transfer = stager.stage(batch)
            batches.overwrite()
            staged = transfer.wait()
            del transfer, batch
            if rng.random() < 0.1:
                staged = fresh.fetch(staged, copy=rng.random() < 0.5).result()
            kept.append((expected, staged))
            wrong += not same(expected, mapped(staged, bits))
            if rng.random() < 0.1:
                known, found = kept[0]
                wrong += not same(known, mapped(found, bits))
                del known, found
            del staged, expected
            if number * SAMPLES // count != (number - 1) * SAMPLES // count:
                gc.collect()
                halves[2 * number // count].append(held((fresh.pool, plain.pool)))
        kept.clear()
        left = [
            stats
            for stats in (fresh.pool.stats(), plain.pool.stats())
            if stats.leased_slabs or stats.in_flight_slabs
        ]
    first, second = (
        {name: OF_SAMPLES.get(name, max)(each[name] for each in half) for name in half[0]}
        for half in halves
    )
    grown = (second["beside_pools"] - first["beside_pools"]) / (count / 2)
    return {
        "batches": count, "wrong": wrong, "left": list(map(str, left)),
        "seconds": round(time.monotonic() - began, 1), "first_half": first, "second_half": second,
        "grown_bytes_per_batch": round(grown, 1),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # collections skip imported objects
    sys.stdout.write(json.dumps(soak(*map(int, sys.argv[1:]))) + "\n")
