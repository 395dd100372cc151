"""Send batches of libraries' classes in every way, and compare with the library's own ``.to()``."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import pinstage as ps
from pinstage._batch import stored_attributes

RAGGED = 4
"""Successive batches, all of different shapes."""

IGNORED = {"_cache", "_last_op", "_locked_schema", "_cached_attr", "_is_initialized", "_handler"}
"""Attributes that libraries use as caches, as a record of how an object was made, and for its
file.
"""


def own_to(batch, device):
    return batch.to(device)


@dataclasses.dataclass
class Case:
    """A class of batches.

    Attributes:
        make: returns the batch with a number; at module level, so that a spawned worker finds it.
        to: the library's own move.
        passthrough: number of tensors or objects of a batch that move with their own ``.to()``.
        stays: whether the library leaves some tensors where they are.
    """

    make: Callable[[int], Any]
    to: Callable[[Any, torch.device], Any] = own_to
    passthrough: int = 0
    stays: bool = False

    def __repr__(self):
        return self.make.__name__


class Made(torch.utils.data.Dataset):
    """Whole batches, made by functions of their number."""

    def __init__(self, cases):
        self.makes = [case.make for case in cases]

    def __len__(self):
        return RAGGED

    def __getitem__(self, index):
        return {"batches": [make(index) for make in self.makes], "index": torch.tensor(index)}


def whole(batch):
    return batch


def check(case, way, device):
    """Send successive ragged batches in one way; compare each with the library's own result."""
    if way == "loader":
        check_loader([case], device)
        return
    with ps.Stager(device, max_bytes="16MiB") as stager:
        for number in range(RAGGED):
            batch = Made([case])[number]
            result = stager.to_device(batch)
            if way == "to_host":
                result = stager.to_host(result)
            compare([case], result, torch.device("cpu") if way == "to_host" else device, number)
            compare([case], batch, None, number)
            if not (case.passthrough or case.stays):
                assert not memory_of(result) & memory_of(batch)
        assert stager.stats().passthrough_leaves == case.passthrough * RAGGED


def memory_of(tree):
    """Return the addresses of tensors, however deep in attributes."""
    met = {}
    assert_alike(tree, tree, met=met)
    tensors = [mine for mine, _ in met.values() if isinstance(mine, torch.Tensor)]
    return {tensor.data_ptr() for tensor in tensors if tensor.numel()}


def check_loader(cases, device, **options):
    """Send batches of all cases through a loader."""
    loader = ps.DataLoader(
        Made(cases), batch_size=None, collate_fn=whole, device=device, max_bytes="16MiB", **options
    )
    for number, result in zip(range(RAGGED), loader, strict=True):
        compare(cases, result, device, number)
    stats = loader.stats()
    assert stats.passthrough_leaves == sum(case.passthrough for case in cases) * RAGGED
    assert stats.fallback_batches == 0


def compare(cases, result, device, number):
    """Compare with the library's own move to a device; for None, with the batches as they were
    made.
    """
    expected = [case.make(number) for case in cases]
    if device is not None:
        expected = [case.to(batch, device) for case, batch in zip(cases, expected, strict=True)]
    index = torch.tensor(number, device=device)
    for case, mine, theirs in zip(cases, result["batches"], expected, strict=True):
        assert_alike(mine, theirs, case.make.__name__)
    assert_alike(result["index"], index)


# -- alike, attribute by attribute -----------------------------------------------------------------


def assert_alike(mine, theirs, path="batch", met=None):
    """Fail unless two things have the same types, values, devices and attributes all the way
    down.
    """
    met = {} if met is None else met
    if id(mine) in met:
        assert met[id(mine)][1] is theirs, f"{path} refers to something else"
        return
    assert type(mine) is type(theirs), f"{path}: {type(mine)} instead of {type(theirs)}"
    if isinstance(mine, weakref.ref):
        assert_alike(mine(), theirs(), f"{path}()", met)
    elif isinstance(mine, torch.Tensor):
        met[id(mine)] = mine, theirs
        assert_same_tensor(mine, theirs, path)
        assert_same_attributes(vars(mine), vars(theirs), path, met)
    elif isinstance(mine, np.ndarray):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs), path
    elif isinstance(
        mine,
        type | torch.Size | torch.device | torch.dtype | str | bytes | int | float | type(None),
    ):
        assert mine == theirs, f"{path}: {mine!r} instead of {theirs!r}"
    else:
        met[id(mine)] = mine, theirs
        assert_same_contents(mine, theirs, path, met)


def assert_same_tensor(mine, theirs, path):
    for name in ("device", "dtype", "shape", "requires_grad", "is_leaf"):
        assert getattr(mine, name) == getattr(theirs, name), f"{path}.{name}"
    mine, theirs = (tensor.detach().as_subclass(torch.Tensor) for tensor in (mine, theirs))
    assert mine.stride() == theirs.stride(), f"{path}.stride()"
    assert torch.equal(mine, theirs), path


def assert_same_contents(mine, theirs, path, met):
    if isinstance(mine, dict):
        assert list(mine) == list(theirs), f"{path}: keys {list(mine)} instead of {list(theirs)}"
        for key in mine:
            assert_alike(mine[key], theirs[key], f"{path}[{key!r}]", met)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), path
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_alike(one, other, f"{path}[{number}]", met)
    elif isinstance(mine, set | frozenset):
        assert mine == theirs, path
    assert_same_attributes(stored_attributes(mine), stored_attributes(theirs), path, met)


def assert_same_attributes(mine, theirs, path, met):
    names, others = (sorted(set(stored) - IGNORED) for stored in (mine, theirs))
    assert names == others, f"{path}: attributes {names} instead of {others}"
    for name in names:
        assert_alike(mine[name], theirs[name], f"{path}.{name}", met)
