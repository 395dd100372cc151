"""Checkpoints of state on a GPU: streams instead of waiting, no page-locking after the first, exact
bytes.
"""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import digest
from torch.distributed.checkpoint import _async_process_executor as processes
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchrun import torchrun

from pinstage.checkpoint import CheckpointStager

pytestmark = pytest.mark.gpu

LARGE, SMALL = 1 << 20, 100
"""Numbers of elements: copied in place, and gathered."""


class Job:
    """Parameters of both sizes and an optimizer, whose kernels have run before."""

    def __init__(self, device):
        self.parameters = [
            torch.nn.Parameter(torch.ones(n, device=device)) for n in (LARGE, LARGE, SMALL, SMALL)
        ]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.step()
        torch.cuda.synchronize(device)

    def step(self):
        self.optimizer.step()

    def state(self):
        return {str(i): parameter.detach() for i, parameter in enumerate(self.parameters)}


def copies_of(stager, device):
    return stager._targets.of(device).out_stream  # for the tests that hold this stream


def event_here():
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.mark.parametrize("hold", ["stream", "step"])
def test_the_call_returns_before_the_copies(cuda_device, latch, hold):
    job = Job(cuda_device)
    with CheckpointStager(max_bytes="64MiB", hold=hold) as stager, latch:
        stager.stage(job.state()).result()
        before = digest(job.state())
        elsewhere = torch.ones(LARGE, device=cuda_device)
        elsewhere.mul_(2)
        torch.cuda.synchronize(cuda_device)
        latch.hold(copies_of(stager, cuda_device))
        staging = stager.stage(job.state())
        if hold == "step":
            elsewhere.mul_(2)
            event_here().synchronize()  # would never return if the stream were held
        job.step()
        stepped = event_here()
        assert not staging.done()
        assert not stepped.query()
        latch.open()
        assert digest(staging.result()) == before
        stepped.synchronize()
        assert digest(job.state()) != before


def test_hold_step_keeps_temporaries_until_they_are_copied(cuda_device, latch):
    with CheckpointStager(max_bytes="64MiB", hold="step") as stager, latch:
        stager.stage({"t": torch.full((LARGE,), 1.0, device=cuda_device)}).result()
        cached = [torch.full((LARGE,), 0.0, device=cuda_device) for _ in range(9)]
        torch.cuda.synchronize(cuda_device)
        del cached
        latch.hold(copies_of(stager, cuda_device))
        staging = stager.stage({"t": torch.full((LARGE,), 3.0, device=cuda_device)})
        others = [torch.full((LARGE,), 5.0, device=cuda_device) for _ in range(8)]
        latch.open()
        assert set(staging.result()["t"].tolist()) == {3.0}
        del others


def test_after_the_first_save_nothing_is_page_locked(cuda_device):
    job = Job(cuda_device)
    with CheckpointStager(max_bytes="64MiB") as stager:
        assert stager.pool.memory.is_pinned
        stager.stage(job.state()).result()
        stager.pool.freeze()
        before = torch.cuda.host_memory_stats()["num_host_alloc"]
        for _ in range(5):
            job.step()
            stager.stage(job.state()).result()
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


def test_a_state_on_gpu_and_cpu_is_staged(cuda_device):
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(8)]).to(cuda_device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 300, device=cuda_device)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = digest(state)
    with CheckpointStager(max_bytes="64MiB") as stager:
        staging = stager.stage(state)
        optimizer.step()
        staged = staging.result()
        assert digest(staged) == before
        assert {t.device.type for t in staged["model"].values()} == {"cpu"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_saves_hold_the_bytes_of_the_call(cuda_device, tmp_path, monkeypatch, kind):
    job = Job(cuda_device)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with CheckpointStager(max_bytes="64MiB") as stager:
            for number in range(3):
                at_the_call = digest(job.state())
                saving = dcp.async_save(
                    job.state(),
                    checkpoint_id=tmp_path / str(number),
                    async_stager=stager,
                    async_checkpointer_type=kind,
                )
                for _ in range(20):
                    job.step()
                saving.upload_completion.result()
                found = {name: torch.zeros_like(tensor) for name, tensor in job.state().items()}
                dcp.load(found, checkpoint_id=tmp_path / str(number))
                assert digest(found) == at_the_call != digest(job.state())
            del saving
    finally:
        processes._CHECKPOINT_PROCESS = None
        gc.collect()
        dist.destroy_process_group()


def test_fsdp2_saves_by_nccl_on_two_gpus(two_devices, tmp_path):
    assert len(two_devices) == 2
    script = Path(__file__).parents[1] / "helpers" / "fsdp_checkpoint.py"
    torchrun(script, tmp_path, "cuda")
