"""Tensors of other libraries' classes are packed with the rest, and keep their class."""

import sys

import library_batches as made
import pytest
import torch
from class_trips import (
    DEVICES,
    Case,
    assert_alike,
    by_device_and_start_method,
    by_device_and_way,
    check,
    check_workers,
    target,
)
from torch.utils._pytree import tree_map

import pinstage as ps


def each_to(batch, device):
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def memory_mapped_to(batch, device):
    """Return a plain tensor also on the CPU, where tensordict returns the very same mapping."""
    mapped, plain = batch
    moved = mapped.to(device)
    return [
        moved.clone() if type(moved) is torch.Tensor else torch.Tensor(moved.clone()),
        plain.to(device),
    ]


@pytest.fixture(autouse=True, scope="module")
def without_torchvision_afterwards():
    """Remove the stand-in: other libraries would take it for the whole torchvision."""
    import monai.data  # noqa: F401 - before the stand-in is there

    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


CASES = [
    Case(made.detection, each_to),
    Case(made.meta_tensor, stays=True),
    Case(made.batch_of_meta_tensors, each_to, stays=True),
    Case(made.memory_mapped, memory_mapped_to),
]


@by_device_and_way(*CASES)
def test_a_batch_arrives_as_by_its_own_to(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_worker_batches_arrive_as_by_to(method, device):
    # monai orders the keys of collated metadata at random in each process.
    check_workers(
        [case for case in CASES if case.make is not made.batch_of_meta_tensors], method, device
    )


def test_all_34_leaves_of_a_detection_are_packed():
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        stager.to_device(made.detection(2))
        stats = stager.stats()
    assert (stats.packed_leaves, stats.passthrough_leaves) == (34, 0)
    assert stats.copies <= stats.blocks < 10


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_requiring_grad_move_by_to(device):
    boxes = made.tv_tensors().BoundingBoxes(
        torch.ones(2, 4), format="XYXY", canvas_size=(4, 4), requires_grad=True
    )
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        staged = stager.to_device([boxes, torch.ones(1)])
        assert stager.stats().passthrough_leaves == 1
    assert_alike(staged[0], boxes.to(target(device)))
    assert staged[0].requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_image_is_packed_once(device):
    image = made.detection(1)["images"][0]
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        staged = stager.to_device({"a": image, "b": [image]})
        assert stager.stats().packed_leaves == 1
    assert staged["a"] is staged["b"][0]


def test_a_path_leads_to_the_tensor_itself():
    slots = ps.Layout.of(made.detection(1)).slots
    assert {"['images'][0]", "['targets'][3]['boxes']"} <= {slot.path for slot in slots}
