"""Trains with transformers' `Trainer`: the mixin `StageInputs` stages its training and evaluation
batches.

    python examples/frameworks/train_transformers.py
    python examples/frameworks/train_transformers.py --way plain  # the Trainer's own, same losses
    torchrun --nproc-per-node 2 examples/frameworks/train_transformers.py
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from visits import Batch, Model, Visits, collate, options, report

from pinstage.integrations.transformers import StageInputs


class StagingTrainer(StageInputs, Trainer):
    """The Trainer, with staged batches."""


class Returns(nn.Module):
    """The model; returns what a Trainer expects, and records training losses and samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[float] = []
        self.samples: list[list[int]] = []

    def forward(
        self, measured: Batch, codes: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss."""
        loss = self.model(measured, codes, labels)
        if self.training:
            self.losses.append(loss.item())
            self.samples.append(index.tolist())
        return {"loss": loss, "logits": labels}


class Weights(TrainerCallback):
    """Records the weights after each step."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Record them."""
        self.steps.append([weight.double().sum().item() for weight in model.parameters()])


def train(arguments: argparse.Namespace, **further: Any) -> dict[str, Any]:
    """Train and evaluate, and return this rank's results."""
    settings = TrainingArguments(
        output_dir=arguments.folder or tempfile.mkdtemp(),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=3,
        dataloader_num_workers=arguments.workers,
        remove_unused_columns=False,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
        **further,
    )
    torch.manual_seed(0)
    model, weights = Returns(), Weights()
    parts = {
        "train_dataset": Visits(arguments.samples),
        "eval_dataset": Visits(24),
        "data_collator": collate,
    }
    kind = StagingTrainer if arguments.way == "pinstage" else Trainer
    trainer: Any = kind(model, settings, callbacks=[weights], **parts)
    if arguments.way == "pinstage":
        trainer.max_bytes = arguments.max_bytes
        trainer.workers = arguments.pack_in != "main"
    trainer.train(resume_from_checkpoint=arguments.resume)
    evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    found = {
        "losses": model.losses,
        "samples": model.samples,
        "weights": weights.steps,
        "evaluated": evaluated,
    }
    if arguments.way == "pinstage":
        stats = trainer.staging_stats()
        found |= {"batches": stats.batches, "passed": stats.passthrough_leaves}
        found |= {"packed_here": trainer.stager.stats().batches}
    return found | {"rank": settings.process_index}


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options."""
    parser = options("Trains with transformers' Trainer.", "pinstage")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pack-in", choices=["workers", "main"], default="workers")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--folder", help="folder for checkpoints")
    parser.add_argument("--resume", help="checkpoint to resume from")
    return parser.parse_args(words)


if __name__ == "__main__":
    arguments = read_options()
    report(arguments.out, **train(arguments))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
