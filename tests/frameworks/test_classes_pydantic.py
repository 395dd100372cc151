"""pydantic's models are supported out of the box, and validated only when they are made."""

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


def model_to(model, device):
    """Move the tensors of a model; pydantic has nothing that does."""
    model.x = model.x.to(device)
    model.more = model.more.to(device)
    return model


def frozen_to(model, device):
    model_to(model.inner, device)
    model.items[:] = [item.to(device) for item in model.items]
    model.__pydantic_private__["_hidden"] = model._hidden.to(device)
    return model


CASES = [Case(made.model, model_to), Case(made.frozen_model, frozen_to)]


@by_device_and_way(*CASES)
def test_a_model_arrives_as_it_was(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_models_arrive_from_workers_as_they_were(method, device):
    check_workers(CASES, method, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_staged_model_has_its_own_field_marks(device):
    original = made.model(1)
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        staged = stager.to_device(original)
    assert staged.model_fields_set == {"x", "more"}
    staged.name = "changed"
    assert "name" in staged.model_fields_set
    assert "name" not in original.model_fields_set
    assert staged.model_copy(update={"x": torch.ones(1)}).x.shape == (1,)
