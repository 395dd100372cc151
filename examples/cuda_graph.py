"""Replay one CUDA graph with new batches, copied into the tensors that the graph was captured with.

    python examples/cuda_graph.py

A training step (forward, backward, optimizer) is captured on the tensors of a staged batch, and
replayed for every batch of the same layout. The losses and the weights are those of the eager loop,
bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

import pinstage as ps

Batch = dict[str, Any]


def batches(count: int, *, size: int = 64, features: int = 32) -> Iterator[Batch]:
    """Yield nested batches of one layout, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(size, features, generator=generator)
        yield {
            "input": {"x": x, "scale": torch.rand(size, 1, generator=generator)},
            "target": x.sum(1, keepdim=True),
        }


def make_step(device: torch.device) -> tuple[torch.nn.Module, Callable[[Batch], torch.Tensor]]:
    """Return a model and its training step, the same each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)  # the graph needs the gradients to keep their memory
        output = model(batch["input"]["x"] * batch["input"]["scale"])
        loss = torch.nn.functional.mse_loss(output, batch["target"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def eager(
    device: torch.device, count: int, warm_ups: int
) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Train without a graph; return the losses and the model."""
    model, step = make_step(device)
    losses = []
    with ps.Stager(device) as stager:
        for number, batch in enumerate(batches(count)):
            staged = stager.to_device(batch)
            for _ in range(warm_ups if number == 0 else 1):
                loss = step(staged)
            losses.append(loss.clone())
    return losses, model


def replayed(
    device: torch.device, count: int, warm_ups: int
) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Train by replaying a graph; return the losses and the model."""
    model, step = make_step(device)
    stream = torch.cuda.Stream(device)
    source = batches(count)
    losses = []
    with ps.Stager(device) as stager, torch.cuda.stream(stream):
        # The graph reads these tensors; keep them as long as the graph.
        static = stager.to_device(next(source))
        for _ in range(warm_ups):
            loss = step(static)
        losses.append(loss.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # records the work without running it
            loss = step(static)
        for batch in source:
            stager.to_device(batch, out=static)
            graph.replay()
            losses.append(loss.clone())
        stream.synchronize()
    return losses, model


def main() -> None:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batches", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "cuda_graph.py needs a CUDA GPU: torch sees none, and a graph can't be captured "
            "without one"
        )
    device = torch.device(args.device)
    (expected, one), (losses, other) = (
        train(device, args.batches, 3) for train in (eager, replayed)
    )
    equal = all(map(torch.equal, expected, losses)) and all(
        map(torch.equal, one.parameters(), other.parameters())
    )
    print(
        f"{len(losses)} batches, last loss {losses[-1].item():.6f}, as the eager loop bit for bit: "
        f"{equal}"
    )
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
