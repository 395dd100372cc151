"""Checkpoints where page-locking a large slab is refused: several slabs, pageable ones if need be."""

import gc
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from doubles import outcome, stays_blocked, wait_until
from torch.distributed.checkpoint import _async_process_executor as processes
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pinstage as ps
from pinstage.checkpoint import CheckpointStager
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    PinningError,
    StagingWarning,
)

KIB = 1 << 10
MOST = 64 * KIB
LIMIT = 100 * KIB

quietly = pytest.mark.filterwarnings("ignore:page-locking of")


class LimitedMemory(ps.memory.SharedMemory):
    """Refuses single blocks above a limit, and counts the requests."""

    def __init__(self, limit=LIMIT):
        super().__init__(register=False)
        self.limit = limit
        self.asked = []

    def allocate(self, nbytes):
        self.asked.append(nbytes)
        if nbytes > self.limit:
            raise PinningError("above the limit", call="cudaHostRegister", nbytes=nbytes)
        return super().allocate(nbytes)


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch):
    monkeypatch.setattr("pinstage._stage._host_slabs.SLAB_BYTES", MOST)


@pytest.fixture
def make_limited():
    pools = []

    def make(max_bytes="4MiB", limit=LIMIT):
        pools.append(ps.SlabPool(max_bytes, memory=LimitedMemory(limit)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def state_of(tensors=20, large=0):
    """Return tensors of 16 KiB each, and a large one in between."""
    state = {f"p{i}": torch.full((4 * KIB,), float(i)) for i in range(tensors)}
    state["large"] = torch.arange(large // 8)
    state["more"] = torch.arange(100)
    return state


def assert_staged(staging, state):
    staged = staging.result()
    assert staged.keys() == state.keys()
    assert all(torch.equal(staged[name], tensor) for name, tensor in state.items())


def is_idle(pool):
    gc.collect()
    return pool.stats().free_bytes == pool.stats().held_bytes


def test_a_refused_state_has_several_slabs(make_limited):
    pool, state = make_limited(), state_of()
    stager = CheckpointStager(pool=pool)
    with pytest.warns(StagingWarning, match=r"slabs of at most 64\.00 KiB .* above the") as told:
        assert_staged(stager.stage(state), state)
    assert len(told) == 1
    assert max(pool.memory.asked[1:]) <= MOST
    assert pool.stats().held_slabs == 6
    asked = len(pool.memory.asked)
    for _ in range(3):
        assert_staged(stager.stage(state), state)
    assert len(pool.memory.asked) == asked, "later saves use the same slabs"
    wait_until(lambda: is_idle(pool))


@quietly
def test_slabs_may_have_the_size_of_the_largest(make_limited):
    pool, state = make_limited(), state_of()
    pool.acquire(96 * KIB).release()
    assert_staged(CheckpointStager(pool=pool).stage(state), state)
    assert pool.stats().held_slabs == 4
    assert max(pool.memory.asked[2:]) <= 96 * KIB


def test_a_refused_large_tensor_is_pageable(make_limited):
    pool, state = make_limited(), state_of(large=200 * KIB)
    stager = CheckpointStager(pool=pool)
    with pytest.warns(StagingWarning) as told:
        assert_staged(stager.stage(state), state)
    assert_staged(stager.stage(state), state)
    assert len(told) == 1
    assert [nbytes for nbytes in pool.memory.asked[1:] if nbytes > LIMIT] == [208 * KIB]


def test_a_state_is_pageable_where_all_is_refused(make_limited):
    pool, state = make_limited(limit=0), state_of()
    stager = CheckpointStager(pool=pool)
    with pytest.warns(StagingWarning) as told:
        assert_staged(stager.stage(state), state)
    assert_staged(stager.stage(state), state)
    assert len(told) == 1
    assert pool.stats().held_bytes == 0


@quietly
def test_a_writer_process_maps_all_slabs(make_limited, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pool, state = make_limited(), state_of(large=200 * KIB)
    with CheckpointStager(pool=pool) as stager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = dcp.async_save(
            state,
            checkpoint_id=tmp_path,
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        saving.upload_completion.result()
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    processes._CHECKPOINT_PROCESS = None
    dist.destroy_process_group()


# -- all slabs, or none ----------------------------------------------------------------------------


@quietly
def test_a_save_ends_when_all_slabs_are_back(make_limited):
    stager = CheckpointStager(pool=make_limited(), timeout=0)
    state = state_of()
    staged = stager.stage(state).result()
    last = staged["more"]
    staged.let_go()
    del staged
    with pytest.raises(AcquireTimeoutError, match="still being written"):
        stager.stage(state)
    del last
    assert_staged(stager.stage(state), state)


@quietly
def test_a_stager_holds_no_slab_while_it_waits(make_limited, background):
    pool, state = make_limited(400 * KIB), state_of()
    stager = CheckpointStager(pool=pool)
    assert_staged(stager.stage(state), state)
    leases = [pool.acquire(MOST) for _ in range(2)]
    waiting = background(stager.stage, state)
    assert stays_blocked(waiting)
    leases += [pool.acquire(MOST, timeout=60) for _ in range(4)]
    for lease in leases:
        lease.release()
    assert_staged(outcome(waiting), state)


@quietly
def test_two_stagers_on_a_pool_take_turns(make_limited):
    pool, states = make_limited(400 * KIB), [state_of(), state_of(19)]
    errors = []

    def save(state):
        try:
            stager = CheckpointStager(pool=pool, timeout=60)
            for _ in range(20):
                assert_staged(stager.stage(state), state)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=save, args=[state]) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    wait_until(lambda: is_idle(pool))


@quietly
def test_a_wait_for_several_slabs_times_out(make_limited):
    pool, state = make_limited(400 * KIB), state_of()
    stager = CheckpointStager(pool=pool, timeout=0.05)
    assert_staged(stager.stage(state), state)
    leases = [pool.acquire(MOST) for _ in range(2)]
    with pytest.raises(AcquireTimeoutError, match=r"within 0\.05 s"):
        stager.stage(state)
    for lease in leases:
        lease.release()
    assert_staged(stager.stage(state), state)


@quietly
def test_the_cap_counts_all_slabs_of_a_state(make_limited):
    stager = CheckpointStager(pool=make_limited(400 * KIB))
    assert_staged(stager.stage(state_of()), state_of())
    with pytest.raises(BudgetExceededError, match=r"this rank does not fit.*: 42 tensors; "):
        stager.stage(state_of(40))


@quietly
def test_larger_slabs_than_needed_are_not_waited_for(make_limited):
    """The pool lends an idle slab of up to twice the size, so that the last slabs have no room."""
    pool, state = make_limited(400 * KIB), state_of()
    stager = CheckpointStager(pool=pool, timeout=60)
    stager._slabs.most = MOST
    leases = [pool.acquire(96 * KIB) for _ in range(4)]
    for lease in leases:
        lease.release()
    assert_staged(stager.stage(state), state)
