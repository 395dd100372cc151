"""Saves an FSDP2 model and Adam's state with `CheckpointStager` during training, and loads them.
Run by torchrun.

torchrun --nproc-per-node 2 fsdp_checkpoint.py FOLDER cuda
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import digest
from fsdp_steps import device_of_rank, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from pinstage.checkpoint import CheckpointStager

WIDTH = 64


class Job:
    """A sharded model, and its optimizer."""

    def __init__(self, device, seed):
        torch.manual_seed(seed)
        self.device = device
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.model = sharded(nn.Sequential(*layers), layers, device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self):
        self.model(torch.randn(8, WIDTH, device=self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def main(folder, device):
    job = Job(device, seed=0)
    # Its thread must not come between training's collectives.
    of_checkpoints = dist.new_group(backend="gloo")
    with CheckpointStager(max_bytes="16MiB") as stager:
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            for number in range(3):
                job.step()
                state = job.state()
                assert all(isinstance(value, DTensor) for value in state["model"].values())
                at_the_call = digest(state)
                path = folder / f"{kind.name}{number}"
                saving = dcp.async_save(
                    state,
                    checkpoint_id=path,
                    process_group=of_checkpoints,
                    async_stager=stager,
                    async_checkpointer_type=kind,
                )
                job.step()
                assert digest(job.state()) != at_the_call
                saving.upload_completion.result()
                other = Job(device, seed=1)
                other.step()
                found = other.state()
                dcp.load(found, checkpoint_id=path)
                set_state_dict(
                    other.model,
                    other.optimizer,
                    model_state_dict=found["model"],
                    optim_state_dict=found["optimizer"],
                )
                assert digest(other.state()) == at_the_call, (kind, number)
        assert stager.pool.stats().held_slabs == 1, stager.pool


if __name__ == "__main__":
    _folder, _kind = sys.argv[1:]
    with device_of_rank(_kind, "cpu:gloo,cuda:nccl") as _device:
        main(Path(_folder), _device)
