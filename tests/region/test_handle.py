"""Regions of several processes: the same bytes, counted once, whichever process ends first."""

import gc
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from doubles import shared_files, wait_until
from region_processes import MIB, use, use_by_rank

import pinstage as ps
from pinstage.errors import ClosedError, PinningError


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def context(request):
    return multiprocessing.get_context(request.param)


def make(**options):
    tree = {
        "cache": torch.empty(2 * MIB, dtype=torch.uint8),
        "table": torch.empty(100, dtype=torch.int64),
        "name": "x",
    }
    return ps.HostRegion.empty_like(tree, shared=True, chunk_bytes=MIB, device="cpu", **options)


def test_another_process_has_the_same_bytes(context):
    ours, theirs = context.Pipe()
    with make(budget=ps.HostBudget(6 * MIB, name="region")) as region:
        region.tree()["cache"][5] = 77
        process = context.Process(target=use, args=(region.handle(), theirs))
        process.start()
        theirs.close()
        assert ours.poll(60), "the process said nothing"
        assert ours.recv() == {
            "seen": 77,
            "name": "x",
            "nbytes": region.nbytes,
        }
        assert region.tree()["table"][1] == 99
        ours.send("end")
        process.join(60)
        assert process.exitcode == 0


def test_a_pickled_handle_is_good_once():
    with make() as region:
        pickled = bytes(ForkingPickler.dumps(region.handle()))
        pickle.loads(pickled)
        with pytest.raises(PinningError, match="unpickle each pickle once"):
            pickle.loads(pickled)


def test_torchs_spawn_takes_a_handle():
    with make() as region:
        torch.multiprocessing.spawn(use_by_rank, (region.handle(),), nprocs=2)
        assert region.tree()["table"][:4].tolist() == [0, 1, 2, 0]


def test_both_mappings_are_registered_alike(cuda):
    region = ps.HostRegion(3 * MIB + 1, shared=True, chunk_bytes=MIB, row_bytes=1000, device=0)
    again = ps.HostRegion.from_handle(region.handle(), device=1)
    for one in (region, again):
        one.synchronize()
        start = one.tensor(1).data_ptr()
        sizes = [cuda.registered[start + 1_048_000 * number] for number in range(4)]
        assert sizes == [1_048_000, 1_048_000, 1_048_000, 3 * MIB + 4096 - 3_144_000]
    assert again.tensor((3000, 1000)).shape == (3000, 1000)
    region.close()
    again.close()
    del region, again, one
    gc.collect()
    wait_until(lambda: not cuda.registered)


def test_a_handle_keeps_the_memory_and_no_descriptor():
    before = shared_files()
    region = make()
    region.tree()["table"].fill_(5)
    handle = region.handle()
    region.close()
    with pytest.raises(ClosedError):
        region.handle()
    del region
    gc.collect()
    with ps.HostRegion.from_handle(handle, device="cpu") as again:
        assert again.tree()["table"].eq(5).all()
        assert len(shared_files() - before) == 1
    del handle, again
    gc.collect()
    wait_until(lambda: shared_files() <= before)
