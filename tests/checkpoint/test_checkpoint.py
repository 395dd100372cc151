"""`CheckpointStager`: it stages a copy of the whole state at the call, in one slab, which is
returned.
"""

import copy
import gc
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from checkpoint_states import adam_state, difference
from doubles import outcome, stays_blocked
from hypothesis import HealthCheck, given, settings
from strategies import bits, passthroughs, tensors
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim.optimizer import _global_optimizer_pre_hooks

import pinstage as ps
from pinstage.checkpoint import CheckpointStager
from pinstage.errors import AcquireTimeoutError, BudgetExceededError


@pytest.fixture
def pool():
    with ps.SlabPool("64MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        yield pool


@pytest.fixture
def stager(pool):
    with CheckpointStager(pool=pool) as stager:
        yield stager


class Opaque:
    """Not a known container."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class CopiesItself:
    """Defines its own copy."""

    def __deepcopy__(self, memo):
        return "a copy"


def in_use(pool):
    """Return the bytes of a pool that are in use."""
    gc.collect()
    stats = pool.stats()
    return stats.leased_bytes + stats.in_flight_bytes


# -- what is staged --------------------------------------------------------------------------------


def test_a_staged_state_equals_torch_s(stager):
    state = adam_state()
    expected = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
    assert difference(stager.stage(state).result(), expected) is None
    assert difference(state, expected) is None


def test_the_metadata_of_a_modules_state_is_kept(stager):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model = stager.stage({"model": module.state_dict()}).result().pop("model")
    assert type(model) is OrderedDict
    assert model._metadata == module.state_dict()._metadata
    del model
    assert stager.stage(module.state_dict()).result()._metadata == module.state_dict()._metadata


def test_a_tensor_that_comes_twice_is_one_tensor(stager, pool):
    tensor = torch.randn(1000)
    module = torch.nn.ModuleList([torch.nn.Linear(500, 500, bias=False) for _ in range(2)])
    module[1].weight = module[0].weight
    staged = stager.stage(
        {"one": tensor, "again": [tensor], "module": module.state_dict()}
    ).result()
    assert staged["one"] is staged["again"][0]
    weights = list(staged["module"].values())
    assert weights[0].data_ptr() == weights[1].data_ptr() != module[0].weight.data_ptr()
    assert pool.stats().in_flight_bytes < 4 * (1000 + 2 * 500 * 500)


def test_a_parameter_may_be_a_key_too(stager):
    parameter = torch.nn.Parameter(torch.ones(3))
    staged = stager.stage({"p": parameter, "by": {parameter: 1}}).result()
    assert next(iter(staged["by"])) is staged["p"]


def test_attributes_of_tensors_are_kept(stager):
    tensor = torch.arange(4.0)
    tensor.note = {"axes": [1, 2]}
    staged = stager.stage({"noted": tensor, "again": tensor, "bare": tensor[:2]}).result()
    assert staged["noted"].note == tensor.note
    assert staged["noted"].note is not tensor.note
    assert staged["noted"] is staged["again"]


def test_objects_are_copied_as_deepcopy_does(stager):
    function = lambda: 3  # noqa: E731 - pickle could not copy it
    held = torch.arange(3)
    thing = Opaque(numbers=[1, 2], tensor=held, function=function, kind=Opaque, own=CopiesItself())
    staged = stager.stage({"thing": thing, "again": thing, "own": thing.own}).result()
    found = staged["thing"]
    thing.numbers.append(3)
    held.add_(1)
    assert found.numbers == [1, 2]
    assert found.tensor.tolist() == [0, 1, 2]
    assert found.function is function
    assert found.kind is Opaque
    assert found.own == staged["own"] == copy.deepcopy(thing.own)
    assert staged["again"] is found


def test_an_uncopyable_object_fails_without_a_slab(stager, pool):
    with pytest.raises(TypeError, match="cannot pickle"):
        stager.stage({"tensor": torch.ones(10), "lock": threading.Lock()})
    assert in_use(pool) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors() | passthroughs())
def test_tensors_of_all_kinds_get_their_own_memory(pool, tensor):
    stager = CheckpointStager(pool=pool, timeout=0)
    staged, tensor = stager.stage({"tensor": tensor}).result()["tensor"], tensor.detach()
    assert (type(staged), staged.dtype, staged.layout) == (
        type(tensor),
        tensor.dtype,
        tensor.layout,
    )
    assert torch.equal(bits(staged.to_dense()), bits(tensor.to_dense()))
    assert not staged.requires_grad
    if tensor.layout is torch.strided and tensor.numel():
        assert staged.data_ptr() != tensor.data_ptr()
        assert staged.untyped_storage().nbytes() == staged.nbytes, "would be saved with the slab"


def test_a_state_without_tensors_needs_no_slab(stager, pool):
    assert stager.stage({"epoch": 3}).result() == {"epoch": 3}
    assert pool.stats().held_bytes == 0


# -- the slab --------------------------------------------------------------------------------------


def test_the_slab_comes_back_when_the_state_dies(stager, pool):
    staged = stager.stage(adam_state()).result()
    stager.synchronize_staging()
    assert pool.stats().owners["checkpoint"].in_flight_bytes == in_use(pool) > 0
    del staged
    assert in_use(pool) == 0


def test_a_second_save_waits_for_the_first(stager, pool, background):
    staged = stager.stage(adam_state()).result()
    second = background(stager.stage, adam_state(seed=1))
    assert stays_blocked(second)
    del staged
    assert difference(outcome(second).result(), adam_state(seed=1)) is None
    assert pool.stats().held_slabs == 1


def test_a_second_save_can_raise_instead(pool):
    stager = CheckpointStager(pool=pool, timeout=0)
    staged = stager.stage(adam_state()).result()
    with pytest.raises(
        AcquireTimeoutError, match=r"the last checkpoint is still being written.*upload_completion"
    ):
        stager.stage(adam_state(seed=1))
    assert difference(staged, adam_state()) is None
    del staged
    assert difference(stager.stage(adam_state(seed=1)).result(), adam_state(seed=1)) is None


def test_a_state_above_the_cap_is_refused_early():
    with CheckpointStager(max_bytes="1MiB") as stager:
        state = {f"p{i}": torch.zeros(100_000) for i in range(10)}
        with pytest.raises(
            BudgetExceededError,
            match=r"this rank does not fit.*: 10 tensors; .* requested 3\.8. MiB.* pass max",
        ) as error:
            stager.stage(state)
        assert (error.value.requested_bytes >= 4_000_000, error.value.max_bytes) == (True, 1 << 20)
        assert stager.pool.stats().held_bytes == 0
        assert stager.stage({"p0": state["p0"]}).result()["p0"].numel() == 100_000


def written(staging, left):
    """Take a state in a thread that ends, as checkpointers do, and leave it behind."""
    thread = threading.Thread(target=lambda: left.append(staging.result()))
    thread.start()
    thread.join()


def test_tensors_left_behind_never_block_forever():
    with ps.SlabPool(max_bytes="1MiB") as pool:
        stager = CheckpointStager(pool=pool)
        state = {"p": torch.ones(100_000)}
        left = []
        for _ in range(2):  # there is room for two
            written(stager.stage(state), left)
        assert pool.stats().held_slabs == 2
        with pytest.raises(AcquireTimeoutError) as error:
            stager.stage(state)
        assert "drop the future of a save that failed" in error.value.__notes__[0]
        left.clear()
        assert stager.stage(state).result()["p"].sum() == 100_000


def test_what_a_stager_is_made_of_is_checked(pool):
    with pytest.raises(ValueError, match=r"exclude each other: .*; give the cap to the pool"):
        CheckpointStager(pool=pool, max_bytes="2MiB")
    with pytest.raises(ValueError, match="timeout must be 0 or more: nan"):
        CheckpointStager(pool=pool, timeout=float("nan"))


def test_a_dropped_stager_leaves_no_hooks(pool):
    hooks = len(_global_optimizer_pre_hooks)
    stager = CheckpointStager(pool=pool, hold="step")
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    assert difference(stager.stage(adam_state()).result(), adam_state()) is None
    adam_state()  # takes a step
    stager.wait_before_change()
    stager.close()
    assert len(_global_optimizer_pre_hooks) == hooks
    died = weakref.ref(stager)
    del stager
    gc.collect()
    assert died() is None
    with pytest.raises(ValueError, match="no such hold: 'never'; pass 'stream' or 'step'"):
        CheckpointStager(pool=pool, hold="never")


def test_its_own_pool_is_shared_and_closed():
    with CheckpointStager(max_bytes="1MiB") as stager:
        assert stager.pool.memory.is_shared
    assert stager.pool.closed
    with pytest.raises(ps.errors.PoolClosedError, match="make a new CheckpointStager"):
        stager.stage({"weight": torch.ones(3)})
