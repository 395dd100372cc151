"""Batches whose leaves have their own memory or share blocks, and checks of what each keeps. For
CPU and GPU.
"""

import torch
from strategies import tensor_of

KIB, MIB = 1024, 1024 * 1024


def of_bytes(nbytes, dtype=torch.float32, seed=0):
    return tensor_of(dtype, (nbytes // dtype.itemsize,), seed)


def few():
    """Leaves of three dtypes and every size group; each has its own memory."""
    return [
        tensor_of(torch.float32, (4, 5)),
        tensor_of(torch.int64, ()),
        of_bytes(100 * KIB, torch.float32),
        tensor_of(torch.uint8, (0, 3)),
        of_bytes(5 * MIB, torch.uint8),
        tensor_of(torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    ]


def many():
    """More leaves, so that they share blocks; more than one block of two groups is full."""
    small = [of_bytes(60 * KIB, torch.float32, seed) for seed in range(20)]
    medium = [of_bytes(MIB, torch.float32, seed) for seed in range(5)]
    return [
        *few(),
        *small,
        *medium,
        of_bytes(64 * KIB, torch.int64),
        of_bytes(4 * MIB, torch.int16),
        *few()[:3],
    ]


def samples():
    """Many small leaves of one dtype, which share a block, and two of another dtype."""
    return [
        *(tensor_of(torch.float32, (3, 4), seed) for seed in range(18)),
        torch.arange(6),
        torch.arange(7),
    ]


def storage_bytes(tensor):
    return tensor.untyped_storage().nbytes()


def assert_own(batch, staged):
    """Fail unless each leaf is as `.to()` would make it: exactly its bytes, shared with no other
    leaf.
    """
    for leaf, other in zip(batch, staged, strict=True):
        assert (storage_bytes(other), other.storage_offset(), other._base) == (leaf.nbytes, 0, None)
        assert other.stride() == leaf.stride()
    addresses = [other.data_ptr() for other in staged if other.nbytes]
    assert len(set(addresses)) == len(addresses)


def assert_in_blocks(batch, staged):
    dtypes = {}
    for leaf, other in zip(batch, staged, strict=True):
        assert other.stride() == leaf.stride()
        assert other._base is None
        if leaf.nbytes >= 4 * MIB:
            assert (storage_bytes(other), other.storage_offset()) == (leaf.nbytes, 0)
        assert storage_bytes(other) <= (
            MIB if leaf.nbytes < 64 * KIB else max(4 * MIB, leaf.nbytes)
        )
        if other.nbytes:
            dtypes.setdefault(other.untyped_storage().data_ptr(), set()).add(other.dtype)
    assert all(len(found) == 1 for found in dtypes.values())
    assert len(dtypes) < len(batch) / 2
