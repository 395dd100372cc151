"""Rows of tensors in memory reach the GPU as indexing gathers them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pinstage as ps

pytestmark = pytest.mark.gpu

CASES = [
    # (length, shape of a row, dtype, rows of a batch): up to 64 KiB, through a slab, and in chunks
    (1000, (13,), torch.float32, 100),
    (200_000, (13,), torch.float32, 8192),
    (100_000, (), torch.int64, 8192),
    (3000, (3, 64, 64), torch.uint8, 1024),
    (200_000, (128,), torch.float32, 60_000),
    (60, (500_001,), torch.uint8, 40),
]


def source_of(length, shape, dtype):
    numbers = torch.arange(length * torch.Size(shape).numel())
    return (numbers * 7 % 251).to(dtype).view(length, *shape)


@pytest.mark.parametrize(("length", "shape", "dtype", "size"), CASES)
def test_rows_arrive_as_indexed(cuda_device, length, shape, dtype, size):
    source = source_of(length, shape, dtype)
    with ps.Stager(cuda_device, max_bytes="1GiB") as stager:
        for _ in range(5):
            index = torch.randint(-length, length, (size,))
            staged = stager.to_device({"x": ps.rows(source, index), "y": ps.rows(source, index)})
            assert torch.equal(staged["x"].cpu(), source[index])
            assert torch.equal(staged["y"].cpu(), source[index])


def test_many_columns_are_gathered_side_by_side(cuda_device):
    columns = [torch.arange(100_000) * number for number in range(26)]
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager:
        for _ in range(20):
            index = torch.randint(100_000, (8192,))
            staged = stager.to_device([ps.rows(column, index) for column in columns])
            for there, column in zip(staged, columns, strict=True):
                assert torch.equal(there.cpu(), column[index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "shape", "dtype", "size"), CASES[:4])
def test_a_loader_s_batches_are_torchs(cuda_device, workers, length, shape, dtype, size):
    dataset = TensorDataset(source_of(length, shape, dtype), torch.arange(length))
    batches = []
    for kind, where in ((DataLoader, {}), (ps.DataLoader, {"device": cuda_device})):
        generator = torch.Generator().manual_seed(1)
        loader = kind(dataset, size, True, generator=generator, num_workers=workers, **where)
        iterator = iter(loader)
        batches.append([next(iterator) for _ in range(min(len(loader), 3))])
    for theirs, ours in zip(*batches, strict=True):
        assert all(leaf.device == cuda_device for leaf in ours)
        assert all(map(torch.equal, theirs, [leaf.cpu() for leaf in ours]))
