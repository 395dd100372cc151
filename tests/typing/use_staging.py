"""Staging as a user writes it. Checked by mypy, never run; lines with an ignore must stay
errors.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import torch

import pinstage as ps


def one_line(batch: dict[str, torch.Tensor]) -> None:
    stager = ps.Stager("cuda:0", max_bytes="2GiB")
    batch = stager.to_device(batch)
    assert_type(stager.device, torch.device)
    assert_type(stager.pool, ps.SlabPool)
    stager.close()


def every_kind_of_device(pool: ps.SlabPool) -> None:
    ps.Stager("cpu")
    ps.Stager()
    ps.Stager(None)
    ps.Stager(torch.device("cuda", 1), pool=pool, pack_threads=4)
    ps.Stager(0, max_bytes=1 << 30, pack_threads="auto")
    ps.Stager("cpu", keep_on_host=["['lengths']"])
    ps.Stager(
        "cpu", keep_on_host=lambda path, leaf: path.endswith("['lengths']") and leaf is not None
    )
    with ps.Stager("cpu") as stager:
        assert_type(stager, ps.Stager)


def a_transfer(stager: ps.Stager, batch: object, stream: torch.cuda.Stream) -> None:
    transfer = stager.stage(batch)
    assert_type(transfer, ps.Transfer[object])
    assert_type(transfer.query(), bool)
    assert_type(transfer.copies, int)
    assert_type(transfer.passthrough_leaves, int)
    transfer.synchronize()
    assert_type(transfer.wait(), object)
    transfer.wait(stream)
    transfer.wait(stream=None)


def prefetching(stager: ps.Stager, loader: torch.utils.data.DataLoader[Any]) -> None:
    assert_type(stager.prefetch(loader, depth=3), ps.Prefetcher[Any])
    assert_type(stager.prefetch([1.5]), ps.Prefetcher[float])
    assert_type(iter(stager.prefetch([1.5])), Iterator[float])
    assert_type(len(stager.prefetch([1.5])), int)
    for batch in stager.prefetch(loader):
        assert_type(batch, Any)


def stats(stager: ps.Stager) -> int:
    counted = stager.stats()
    assert_type(counted, ps.StagerStats)
    assert_type(counted.pool, ps.PoolStats)
    assert_type(counted.pool.max_bytes_reason, str)
    assert_type(counted.pool.wait_seconds, float)
    return (
        counted.batches
        + counted.copies
        + counted.packed_leaves
        + counted.packed_bytes
        + counted.passthrough_leaves
    )


def wrong(stager: ps.Stager, pool: ps.SlabPool, batch: object) -> None:
    ps.Stager("cpu", pool)  # type: ignore[call-arg]
    ps.Stager("cpu", max_bytes=1.5)  # type: ignore[arg-type]
    ps.Stager("cpu", pack_threads="4")  # type: ignore[arg-type]
    stager.prefetch([batch], 2)  # type: ignore[call-overload]
    stager.prefetch(3)  # type: ignore[call-overload]
    stager.stage()  # type: ignore[call-overload]
    stager.pool = pool  # type: ignore[misc]
    stager.device = "cpu"  # type: ignore[misc, assignment]
    stager.stats().batches = 3  # type: ignore[misc]
    stager.stage(batch).nbytes = 1  # type: ignore[misc]
    stager.stage(batch).wait("cuda:0")  # type: ignore[arg-type]
    stager.stage(batch).done()  # type: ignore[attr-defined]


def to_the_host(stager: ps.Stager, tree: object) -> None:
    transfer = stager.fetch(tree)
    assert_type(transfer, ps.HostTransfer[object])
    assert_type(transfer.query(), bool)
    assert_type(transfer.copies, int)
    assert_type(transfer.nbytes, int)
    assert_type(transfer.wait(), object)
    transfer.synchronize()
    stager.fetch(tree, copy=True)
    stager.fetch(tree, True)  # type: ignore[call-arg]
    assert_type(stager.to_host(tree), object)
    assert_type(stager.stats().fetched_bytes, int)


def time_outs() -> None:
    ps.Stager("cuda", timeout=None)
    ps.Stager("cuda", timeout=2.5)


def numa_nodes() -> None:
    assert_type(ps.memory.RegisteredMemory("cuda:1", numa_node="auto").numa, str)
    ps.memory.RegisteredMemory(numa_node=1)
    ps.memory.RegisteredMemory(numa_node="near")  # type: ignore[arg-type]


def weights(stager: ps.Stager, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    found = stager.load_weights(model, torch.load("w.pt", mmap=True))
    assert_type(found, ps.IncompatibleKeys)
    assert_type(found.missing_keys, list[str])
    stager.load_weights(tensors, iter(tensors.items()), strict=False)
    stager.load_weights(model, tensors, False)  # type: ignore[call-arg]


def offloading(model: torch.nn.Module, pool: ps.SlabPool) -> None:
    with ps.offload.frozen_module(model, pool, device="cuda") as handle:
        assert_type(handle, ps.offload.Offloaded)
        assert_type(handle.stats().host_bytes, int)
    ps.offload.frozen_module(model, pool, "cuda")  # type: ignore[call-arg]
