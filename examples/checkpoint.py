"""Save checkpoints while training continues, and compare each with the state at the time of its
call.

    python examples/checkpoint.py --device cuda --saves 5

A model with Adam takes a step, saves, and takes more steps at once. Each checkpoint holds the
values at the time of its call, bit for bit. The saves use one pool, which is frozen after the
first: later saves page-lock no memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import pinstage as ps
from pinstage.checkpoint import CheckpointStager


def copied(state: Any) -> Any:
    """Return a copy of a state's tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return (
        {key: copied(value) for key, value in state.items()} if isinstance(state, dict) else state
    )


def equal(one: Any, other: Any) -> bool:
    """Say whether two states have the same values."""
    if isinstance(one, dict):
        return all(equal(value, other[key]) for key, value in one.items())
    return torch.equal(one, other.cpu()) if isinstance(one, torch.Tensor) else bool(one == other)


def run(
    device: torch.device, saves: int, folder: Path, *, width: int = 512, layers: int = 8
) -> dict[str, Any]:
    """Train and save; return the time of each call in ms, and the number of correct checkpoints."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, width, device=device)).square().mean().backward()
        optimizer.step()

    calls, good = [], 0
    with (
        ps.SlabPool("1GiB", memory=ps.memory.SharedMemory()) as pool,
        CheckpointStager(pool=pool, hold="step") as stager,
    ):
        for number in range(saves):
            step()
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict()["state"],
                "number": number,
            }
            expected = copied(state)
            start = time.perf_counter()
            path = folder / str(number)
            saving = dcp.async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)
            calls.append(round((time.perf_counter() - start) * 1e3, 2))
            step()  # returns at once: only the device waits for the copies
            step()
            saving.upload_completion.result()
            if number == 0:
                pool.freeze()
            found = copied(state)
            dcp.load(found, checkpoint_id=path, no_dist=True)
            good += equal(expected, found)
        return {
            "calls_ms": calls,
            "good": good,
            "saves": saves,
            "pool_bytes": pool.stats().held_bytes,
        }


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--saves", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as folder:
        report = run(torch.device(args.device), args.saves, Path(folder))
    print(f"{report['good']} of {report['saves']} checkpoints hold the values of their call")
    print(f"async_save returned after {', '.join(map(str, report['calls_ms']))} ms")
    print(f"{report['pool_bytes'] / 2**20:.0f} MiB of the pool, all of it since the first save")


if __name__ == "__main__":
    main()
