"""Trains with Lightning, on one process or several: `StageBatches` stages what the trainer would
move.

    python examples/frameworks/train_lightning.py
    python examples/frameworks/train_lightning.py --way plain   # Lightning's own way, same losses
    python examples/frameworks/train_lightning.py --way loader  # ps.DataLoader instead
    torchrun --nproc-per-node 2 examples/frameworks/train_lightning.py
"""

import os
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from visits import Batch, Model, Visits, collate, options, report

import pinstage as ps
from pinstage.integrations.lightning import StageBatches


class Module(LightningModule):
    """The model, the samples that it trained on, and the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[float] = []
        self.samples: list[list[int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(**batch)
        self.losses.append(loss.item())
        self.samples.append(batch["index"].tolist())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("loss", self.model(**batch), batch_size=len(batch["labels"]))

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the indices of the samples."""
        return batch["index"].cpu()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_loader(way: str, dataset: Visits, **others: Any) -> DataLoader[Batch]:
    """Return torch's loader, or ours, which needs no callback."""
    others = {"batch_size": 4, "collate_fn": collate, **others}
    if way == "loader":
        return ps.DataLoader(dataset, **others)
    return DataLoader(dataset, **others)


def main() -> None:
    """Run one rank."""
    parser = options("Trains with Lightning.", "callback", "loader")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()

    seed_everything(0, verbose=False)
    stage = StageBatches(max_bytes=arguments.max_bytes)
    trainer = Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp" if "LOCAL_WORLD_SIZE" in os.environ else "auto",
        accelerator="auto",
        callbacks=[stage] if arguments.way == "callback" else [],
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    training = make_loader(arguments.way, Visits(64), shuffle=True, num_workers=arguments.workers)
    trainer.fit(
        module, training, make_loader(arguments.way, Visits(16), num_workers=arguments.workers)
    )
    batches = 0
    if arguments.way == "callback":
        batches = stage.stats().batches
    # Lightning made a new loader with its own sampler: this one has the stats.
    if arguments.way == "loader":
        batches = trainer.train_dataloader.stats().batches
    report(
        arguments.out,
        trainer.global_rank,
        losses=module.losses,
        samples=module.samples,
        batches=batches,
    )


if __name__ == "__main__":
    main()
