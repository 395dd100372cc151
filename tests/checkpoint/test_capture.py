"""In a thread that captures a graph, no state is staged, and no save is lost."""

import torch
from doubles import ManualEvent, refuse

from pinstage.checkpoint import CheckpointStager


def test_a_refused_save_can_be_repeated(capture):
    state = {"weight": torch.ones(3)}
    with CheckpointStager(max_bytes="1MiB") as stager:
        with capture():
            refuse(stager.stage, state)
        assert stager.pool.stats().held_slabs == 0
        assert stager.stage(state).result()["weight"].eq(1).all()


def test_a_step_that_must_wait_is_refused(capture):
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with CheckpointStager(max_bytes="1MiB", hold="step") as stager:
        with capture():
            optimizer.step()  # no copy is under way
        stager._copies = ManualEvent()
        with capture():
            refuse(optimizer.step)
        assert parameter.eq(-1).all()
        optimizer.step()
        assert parameter.eq(-2).all()
        assert stager._copies is None


def test_a_save_arrives_while_the_trainer_captures(capture):
    with CheckpointStager(max_bytes="1MiB") as stager:
        saving = stager.stage({"weight": torch.ones(3)})
        with capture():
            assert saving.result()["weight"].eq(1).all()
            stager.synchronize_staging()
