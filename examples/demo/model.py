"""A small model for ragged hours: embed each observation, pool by hour, predict the delays.

Two properties matter more here than its accuracy. It reads every leaf of the batch, so that one
wrong byte changes the loss. And it is the same to the last bit on every run: pooling is a matrix
product and not an atomic scatter, ids are one-hot comparisons and not embedding gathers, and leaves
are concatenated before any arithmetic, so that the address of a leaf cannot affect the choice of a
kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from demo.batch import Array, RaggedBatch
from demo.data import AIRPORTS, DEPARTURE_CHANNELS, HOUR, RECENT_CHANNELS, WEATHER_CHANNELS

WIDTH = 32
BUCKETS = 16
"""Ids and tail numbers are folded into this many classes."""
SECTORS = 9
CALENDAR = 4
CHANNELS = {
    "weather": len(WEATHER_CHANNELS),
    "departures": len(DEPARTURE_CHANNELS),
    "recent": len(RECENT_CHANNELS),
}
CENTRE = (40.7, -74.0)
"""New York in degrees; coordinates are relative to it, in units of ten degrees."""
CUBLAS_WORKSPACE = ":4096:8"
"""The setting that makes cuBLAS deterministic (cuBLAS manual, "Results Reproducibility")."""


class DelayModel(nn.Module):
    """Predict the mean departure delay at each airport from a `RaggedBatch` on the model's
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict()
        for kind, channels in CHANNELS.items():
            # values, observed, coordinates and whether they are known, age, id, then wind sector or
            # tail number
            features = 2 * channels + 3 + 1 + BUCKETS + (SECTORS if kind == "weather" else BUCKETS)
            self.encoders[kind] = nn.Sequential(
                nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
            )
        pooled = len(CHANNELS) * (WIDTH + 1) + CALENDAR
        self.head = nn.Sequential(
            nn.Linear(pooled, WIDTH), nn.ReLU(), nn.Linear(WIDTH, len(AIRPORTS))
        )

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Return float32 `[samples, 3]`, delays in half hours."""
        times = torch.stack([_tensor(sample.time) for sample in batch.samples])
        pooled = [torch.stack([_tensor(sample.calendar) for sample in batch.samples]).float()]
        for kind, encoder in self.encoders.items():
            segments = _tensor(batch.segments[kind])
            if segments.numel() == 0:
                pooled.append(times.new_zeros((len(times), WIDTH + 1), dtype=torch.float32))
                continue
            embedded = encoder(_features(batch, kind, times[segments]))
            member = (
                torch.arange(len(times), device=times.device).unsqueeze(1) == segments
            ).float()
            count = member.sum(1, keepdim=True)
            pooled += [member @ embedded / count.clamp(min=1), count.log1p()]
        prediction: Tensor = self.head(torch.cat(pooled, 1))
        return prediction

    def loss(self, batch: RaggedBatch) -> Tensor:
        """Return the smooth L1 loss over the airports that had departures; float32 `[]`."""
        target = torch.stack([_tensor(sample.target) for sample in batch.samples])
        mask = torch.stack([_tensor(sample.target_mask) for sample in batch.samples]).float()
        each = nn.functional.smooth_l1_loss(self(batch), target, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)


def _features(batch: RaggedBatch, kind: str, now: Tensor) -> Tensor:
    """Return float32 `[rows, features]` for all streams of a kind; `now` is each row's sample
    time.
    """
    streams = batch.streams(kind)
    observed = _cat([stream.observed for stream in streams])
    coordinates = _cat([stream.coordinates for stream in streams])
    located = ~coordinates.isnan()
    relative = torch.stack([coordinates[:, 0] - CENTRE[0], coordinates[:, 1] - CENTRE[1]], 1) / 10
    age = (now - _cat([stream.times for stream in streams])).unsqueeze(1) / HOUR
    features = [
        _cat([stream.values for stream in streams]).masked_fill(~observed, 0),
        observed,
        relative.masked_fill(~located, 0),
        located[:, :1],
        age,
        _one_hot(_cat([stream.ids for stream in streams]) % BUCKETS, BUCKETS),
    ]
    if kind == "weather":
        features.append(_one_hot(_cat([stream.sectors for stream in streams]), SECTORS))
    else:
        features.append(_one_hot(_cat([stream.tails for stream in streams]) % BUCKETS, BUCKETS))
    return torch.cat([feature.float() for feature in features], 1)


def _cat(leaves: list[Array] | list[Array | None]) -> Tensor:
    return torch.cat([_tensor(leaf) for leaf in leaves if leaf is not None])


def _one_hot(classes: Tensor, count: int) -> Tensor:
    return classes.unsqueeze(1) == torch.arange(count, device=classes.device)


def _tensor(leaf: Array) -> Tensor:
    """Return a leaf as a tensor for type checkers: once staged, it always is one."""
    return cast(Tensor, leaf)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make training repeatable to the last bit, and restore all settings afterwards.

    The CPU uses one thread, so that no sum depends on how the work was divided. `empty` tensors are
    not filled, as torch would do in this mode: the fill would be timed with every copy.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A module with a property, which type checkers do not see.
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    try:
        if workspace not in (CUBLAS_WORKSPACE, ":16:8"):
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
        torch.use_deterministic_algorithms(True)
        filling.fill_uninitialized_memory = False
        if device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
        filling.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
