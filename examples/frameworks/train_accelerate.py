r"""Trains with Accelerate: accumulates gradients over three batches; can resume in the middle of an
epoch.

    python examples/frameworks/train_accelerate.py
    python examples/frameworks/train_accelerate.py --way plain  # Accelerate's own way, same losses
    python examples/frameworks/train_accelerate.py --skip 5     # begins with batch 5
    accelerate launch --num_processes 2 \\
        examples/frameworks/train_accelerate.py --dispatch-batches
"""

import argparse
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from visits import Model, Visits, collate, options, report

import pinstage.integrations.accelerate as staging


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and return this rank's results."""
    config = DataLoaderConfiguration(
        dispatch_batches=arguments.dispatch_batches or None,
        split_batches=arguments.split_batches,
        even_batches=not arguments.uneven_batches,
        use_stateful_dataloader=arguments.use_stateful_dataloader,
    )
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not on_gpu, gradient_accumulation_steps=3, dataloader_config=config
    )
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(
        Visits(arguments.samples),
        4,
        shuffle=True,
        collate_fn=collate,
        num_workers=arguments.workers,
    )
    if arguments.way == "pinstage":
        loader = staging.prepare(accelerator, loader, max_bytes=arguments.max_bytes)
        first = staging.skip_first_batches(loader, arguments.skip) if arguments.skip else loader
    else:
        loader = accelerator.prepare(loader)
        first = accelerate.skip_first_batches(loader, arguments.skip) if arguments.skip else loader

    found: dict[str, list[Any]] = {
        "losses": [],
        "samples": [],
        "ends": [],
        "gathered": [],
        "weights": [],
    }
    for epoch in range(arguments.epochs):
        for batch in loader if epoch else first:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["samples"].append(batch["index"].tolist())
            found["ends"].append(accelerator.gradient_state.end_of_dataloader)
            if not arguments.uneven_batches:
                found["gathered"].append(len(accelerator.gather_for_metrics(batch["index"])))
            if accelerator.sync_gradients:
                found["weights"].append(
                    [weight.double().sum().item() for weight in model.parameters()]
                )
    batches = loader.stats().batches if arguments.way == "pinstage" else 0
    return found | {"batches": batches, "rank": accelerator.process_index}


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options."""
    parser = options("Trains with Accelerate.", "pinstage")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="batches to skip in the first epoch")
    for name in ("dispatch-batches", "split-batches", "uneven-batches", "use-stateful-dataloader"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    arguments = read_options()
    found = train(arguments)
    report(arguments.out, **found)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
