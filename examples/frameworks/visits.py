"""The data and the model of the programs beside this file: small, nested, and the same for a seed."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

Batch = dict[str, Any]
CODES = 6
"""Codes of a visit; fewer are filled up with 0."""


class Visits(Dataset[Batch]):
    """So many samples, each a nested dictionary of tensors that its index decides."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        codes = torch.zeros(CODES, dtype=torch.int64)
        codes[: 1 + index % CODES] = torch.randint(1, 50, (1 + index % CODES,), generator=generator)
        measured = {"signal": torch.randn(16, generator=generator), "age": torch.rand((), generator=generator)}
        return {"index": index, "measured": measured, "codes": codes, "labels": torch.rand((), generator=generator)}


def collate(samples: list[Batch]) -> Batch:
    """Stack samples; a function of the module, so that workers can be spawned."""
    batch: Batch = default_collate(samples)
    return batch


class Model(nn.Module):
    """Says how long a visit takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 8, mode="sum")
        self.layers = nn.Sequential(nn.Linear(16 + 1 + 8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, measured: Batch, codes: torch.Tensor, labels: torch.Tensor, **others: object) -> torch.Tensor:
        """Return the loss, float32 `[]`, of the parts of a batch."""
        del others
        inputs = torch.cat([measured["signal"], measured["age"].unsqueeze(1), self.embedding(codes)], dim=1)
        return nn.functional.mse_loss(self.layers(inputs).squeeze(1), labels)
