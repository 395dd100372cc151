"""A replay buffer in host memory, whose random rows are gathered into each batch.

    python examples/replay_buffer.py

Observations are written into preallocated tensors while training reads random steps of them.
`ps.rows` stands for these steps; the rows are gathered by several threads right into page-locked
memory. Each batch is compared with indexing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import pinstage as ps

FRAME = (4, 84, 84)


@ps.register_node
@dataclass
class Step:
    """Steps of an environment: frames, actions, rewards, and frames after them."""

    frames: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_frames: torch.Tensor


class ReplayBuffer:
    """The latest steps of an environment, on the host."""

    def __init__(self, capacity: int) -> None:
        self._frames = torch.zeros((capacity, *FRAME), dtype=torch.uint8)
        self._next_frames = torch.zeros((capacity, *FRAME), dtype=torch.uint8)
        self._actions = torch.zeros(capacity, dtype=torch.int64)
        self._rewards = torch.zeros(capacity)
        self._written = 0

    def add(self, step: Step) -> None:
        """Write a step in the place of the oldest one."""
        place = self._written % len(self._actions)
        self._frames[place] = step.frames
        self._next_frames[place] = step.next_frames
        self._actions[place] = step.actions
        self._rewards[place] = step.rewards
        self._written += 1

    def sample(self, size: int) -> tuple[torch.Tensor, Step]:
        """Return the places of random steps, and a batch that stands for them."""
        index = torch.randint(min(self._written, len(self._actions)), (size,))
        tensors = self._frames, self._actions, self._rewards, self._next_frames
        rows: list[object] = [ps.rows(tensor, index) for tensor in tensors]
        return index, Step(*rows)  # type: ignore[arg-type]

    def indexed(self, index: torch.Tensor) -> Step:
        """Return steps by indexing."""
        tensors = self._frames, self._actions, self._rewards, self._next_frames
        return Step(*(tensor[index] for tensor in tensors))


def observe(number: int) -> Step:
    """Return a step of an environment that shows its number."""
    frames = torch.full(FRAME, number % 256, dtype=torch.uint8)
    return Step(frames, torch.tensor(number % 6), torch.tensor(number / 10), frames + 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Fill a buffer, and train on random steps of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args(argv)
    buffer, equal = ReplayBuffer(options.capacity), 0
    with ps.Stager(options.device, max_bytes="256MiB") as stager:
        for number in range(options.capacity):
            buffer.add(observe(number))
        for number in range(options.batches):
            index, steps = buffer.sample(64)
            batch = stager.to_device(steps)
            expected = buffer.indexed(index)
            equal += all(
                torch.equal(there.cpu(), here)
                for there, here in zip(vars(batch).values(), vars(expected).values(), strict=True)
            )
            buffer.add(observe(options.capacity + number))  # all rows have been read
    print(f"{equal} of {options.batches} batches on {options.device} equal the buffer's rows")


if __name__ == "__main__":
    main()
