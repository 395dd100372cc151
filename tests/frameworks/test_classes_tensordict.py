"""tensordict's classes are supported out of the box."""

import library_batches as made
import pytest
import torch
from class_trips import (
    DEVICES,
    Case,
    by_device_and_start_method,
    by_device_and_way,
    check,
    check_workers,
    target,
)

import pinstage as ps

CASES = [
    Case(made.plain_td),
    Case(made.named_td),
    Case(made.locked_td),
    Case(made.td_with_a_device),
    Case(made.td_with_objects),
    Case(made.lazy_stack),
    Case(made.decorated_tensorclass),
    Case(made.inherited_tensorclass),
    Case(made.td_params, passthrough=1),
]


@by_device_and_way(*CASES)
def test_a_batch_arrives_as_by_its_own_to(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_worker_batches_arrive_as_by_to(method, device):
    check_workers(CASES, method, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensordict_s_device_is_its_tensors_device(device):
    device = target(device)
    with ps.Stager(device, max_bytes="1MiB") as stager:
        for number in range(3):
            staged = stager.to_device(made.plain_td(number))
            assert staged.device == staged["z"].device == staged["a", "deep"].device == device
            back = stager.to_host(staged)
            assert str(back.device) == str(back["a"].device) == "cpu"


def test_parts_without_tensors_don_t_decide_the_device():
    from tensordict import LazyStackedTensorDict, TensorDict

    empty = TensorDict({"deep": TensorDict({}, [2], device="meta")}, [2], device="meta")
    lazy = LazyStackedTensorDict(
        TensorDict({"x": torch.ones(3)}, []), TensorDict({"x": torch.ones(3)}, [])
    )
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        for part in (TensorDict({"x": torch.ones(2)}, [2]), lazy):
            assert (
                str(stager.to_device(TensorDict({"part": part, "empty": empty}, [2])).device)
                == "cpu"
            )


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_td_is_staged_as_it_is(device):
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        empty, _ = stager.to_device(made.empty_td(3))
        assert (empty.batch_size, list(empty.keys())) == ((3,), [])


def test_a_td_is_packed_with_the_rest():
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        stager.to_device({"td": made.plain_td(1), "more": made.values(1)})
        stats = stager.stats()
    assert (stats.packed_leaves, stats.copies, stats.passthrough_leaves) == (3, 3, 0)
