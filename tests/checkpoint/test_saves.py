"""Checkpoints that are really written and read: with torch's writers in a thread and a process, and
on two ranks.
"""

import contextlib
import gc
import os
import signal
import threading
import time
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import adam_state, digest
from doubles import wait_until
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import _async_process_executor as processes
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardedAlong
from torch.utils._pytree import tree_map_only
from torchrun import torchrun

import pinstage as ps
from pinstage._pool import descriptor_of
from pinstage.checkpoint import CheckpointStager
from pinstage.errors import PinstageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:Detected an existing checkpoint",
    "ignore::FutureWarning",
)

IN_PROCESS = AsyncCheckpointerType.PROCESS


@pytest.fixture(scope="module")
def alone():
    """A process group of this process, as the checkpointer in a process needs one. Tests share that
    process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        end_writer()
        dist.destroy_process_group()


@pytest.fixture
def stager():
    with CheckpointStager(max_bytes="1MiB") as stager:
        yield stager


def end_writer():
    """Forget the writer process, as a program must that has lost it; end it if it is alive."""
    processes._CHECKPOINT_PROCESS = None
    gc.collect()
    resource_sharer.stop()  # else it keeps the descriptors that a dead writer hasn't fetched


def save(state, path, stager, kind=AsyncCheckpointerType.THREAD):
    """Begin to save a state; return torch's response."""
    return dcp.async_save(
        state, checkpoint_id=path, async_stager=stager, async_checkpointer_type=kind
    )


def loaded(path, like):
    """Read a checkpoint back."""
    found = tree_map_only(torch.Tensor, torch.zeros_like, like) | {"epochs": None, "name": None}
    dcp.load(found, checkpoint_id=path)
    return found


def settled(pool):
    """Wait until the pool is idle: the writer thread ends after its future is done."""
    wait_until(lambda: (stats := pool.stats()).in_flight_bytes + stats.leased_bytes == 0)
    return pool.stats()


def change(state):
    """Change values, as training does."""
    state["epochs"][-1] += 1
    tree_map_only(torch.Tensor, lambda tensor: tensor.add_(1), state)


# -- a thread --------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_bytes_of_the_call(tmp_path, stager):
    state = adam_state()
    trains = threading.Event()

    def train():
        while not trains.is_set():
            change(state)

    for step in range(5):
        at_the_call = digest(state)
        response = save(state, tmp_path / str(step), stager)
        trains.clear()
        training = threading.Thread(target=train)
        training.start()
        response.upload_completion.result()
        trains.set()
        training.join()
        assert digest(state) != at_the_call == digest(loaded(tmp_path / str(step), state))
    assert settled(stager.pool).held_slabs == 1


def test_fifty_saves_take_no_more_memory_than_ten(tmp_path, stager):
    state = adam_state()

    def resident():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def save_times(count):
        for step in range(count):
            save(state, tmp_path / str(step % 2), stager).upload_completion.result()

    save_times(10)
    before = resident()
    stager.pool.freeze()
    save_times(50)
    assert resident() - before < 4 << 20
    assert settled(stager.pool).held_slabs == 1


def test_a_failed_save_loses_no_slab(tmp_path, stager):
    state = adam_state()
    (tmp_path / "file").write_text("in the way")
    response = save(state, tmp_path / "file" / "folder", stager)
    with pytest.raises(dcp.CheckpointException, match="Not a directory"):
        response.upload_completion.result()
    del response
    gc.collect()
    settled(stager.pool)
    save(state, tmp_path / "good", stager).upload_completion.result()
    assert digest(loaded(tmp_path / "good", state)) == digest(state)


def test_a_reused_planner_blocks_no_save(tmp_path):
    planner, state = DefaultSavePlanner(), adam_state()
    with CheckpointStager(max_bytes="1MiB") as stager:
        for step in range(4):
            save = dcp.async_save(
                state, checkpoint_id=tmp_path / str(step), planner=planner, async_stager=stager
            )
            save.upload_completion.result()
            change(state)
        assert stager.pool.stats().held_slabs == 2


# -- a process -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_writer_process_maps_the_slab_without_copying(tmp_path, stager):
    state = adam_state()
    for step in range(3):
        at_the_call = digest(state)
        response = save(state, tmp_path / str(step), stager, IN_PROCESS)
        change(state)
        response.upload_completion.result()
        assert digest(loaded(tmp_path / str(step), state)) == at_the_call
    assert settled(stager.pool).held_slabs == 1
    with stager.pool.acquire(stager.pool.stats().held_bytes) as lease:
        slab = f" {os.fstat(descriptor_of(lease)).st_ino} "
    maps = Path(f"/proc/{processes._CHECKPOINT_PROCESS._save_process.pid}/maps").read_text(
        encoding="utf-8"
    )
    shared = [
        line
        for line in maps.splitlines()
        if "rw-s" in line and ("memfd" in line or "torch_" in line)
    ]
    assert shared
    assert all(slab in line for line in shared), (slab, shared)


@pytest.mark.usefixtures("alone")
# torch asks a dead process to end.
@pytest.mark.filterwarnings(
    r"ignore:(?s).*_AsyncCheckpointProcess\.__del__:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("holds_the_future", [False, True])
def test_a_writer_that_is_killed_loses_no_slab(tmp_path, stager, holds_the_future):
    state = adam_state()
    kept = []
    for delay in (0.0, 0.05):
        save(state, tmp_path / "first", stager, IN_PROCESS).upload_completion.result()
        writer = processes._CHECKPOINT_PROCESS._save_process.pid
        os.kill(writer, signal.SIGSTOP)  # so that it is in the middle of the save, or before it
        if delay:
            os.kill(writer, signal.SIGCONT)
        response = save(state, tmp_path / "second", stager, IN_PROCESS)
        time.sleep(delay)
        os.kill(writer, signal.SIGKILL)
        with contextlib.suppress(RuntimeError, OSError):  # the save may have finished before
            response.upload_completion.result()
        if holds_the_future:
            kept.append(response)
        del response
        end_writer()
    save(state, tmp_path / "third", stager).upload_completion.result()
    assert digest(loaded(tmp_path / "third", state)) == digest(state)
    assert settled(stager.pool).held_slabs <= 2  # one may be needed before a dead writer's is back


@pytest.mark.usefixtures("alone")
def test_memory_a_writer_cannot_map_is_refused(tmp_path):
    with ps.SlabPool("1MiB", memory=ps.memory.PageableMemory()) as pool:
        response = save(adam_state(), tmp_path, CheckpointStager(pool=pool), IN_PROCESS)
        with pytest.raises(
            PinstageError, match=r"cannot map the pool's memory: \d+ bytes; make the pool of"
        ):
            response.upload_completion.result()
        del response
        gc.collect()
        settled(pool)


# -- what is in shards -----------------------------------------------------------------------------


def sharded(mesh, whole, local):
    """Return a state of a distributed tensor and a sharded one."""
    shard = Shard.from_tensor_and_offsets(local, [0, 0], 0)
    return {
        "dtensor": distribute_tensor(whole, mesh, [ShardedAlong(0)]),
        "sharded": init_from_local_shards([shard], *local.shape),
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, IN_PROCESS])
def test_sharded_tensors_keep_torch_s_planning_types(tmp_path, stager, kind):
    mesh, local = init_device_mesh("cpu", (1,)), torch.arange(6.0).view(2, 3)
    state = sharded(mesh, torch.arange(12.0).view(4, 3), local)
    along = state["again"] = state["dtensor"]
    staged = stager.stage(state).result()
    assert (type(staged["dtensor"]), type(staged["sharded"])) == (DTensor, ShardedTensor)
    assert staged["dtensor"] is staged["again"]
    assert staged["dtensor"].device_mesh is mesh
    assert staged["dtensor"].placements == along.placements
    assert staged["dtensor"].to_local().data_ptr() != along.to_local().data_ptr()
    assert torch.equal(staged["dtensor"].to_local(), along.to_local())
    assert staged["sharded"].metadata().size == state["sharded"].metadata().size
    assert torch.equal(staged["sharded"].local_shards()[0].tensor, local)
    del staged
    response = save(state, tmp_path, stager, kind)
    along.to_local().add_(1)
    local.add_(1)
    response.upload_completion.result()
    found = sharded(mesh, torch.zeros(4, 3), torch.zeros(2, 3))
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["dtensor"].to_local() + 1, along.to_local())
    assert torch.equal(found["sharded"].local_shards()[0].tensor + 1, local)


def test_fsdp2_on_two_ranks_saves_and_loads(tmp_path):
    torchrun(Path(__file__).parents[1] / "helpers" / "fsdp_checkpoint.py", tmp_path, "cpu")
