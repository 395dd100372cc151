"""Training loops of frameworks and of loaders that aren't torch's, with `pin_memory=True` and with
pinstage.

    python benchmarks/frameworks.py --out benchmarks/results/frameworks.json
    python benchmarks/frameworks.py --smoke                     # a small run on the CPU

Each loop trains one model with one seed in every variant. A figure is the time of the whole loop
over its steps (`comparison/loop_timer.py`). ``detail`` has the share of the time in which the GPU
was idle, and the losses; a variant whose losses differ from those of ``pin_memory`` in any bit is
incorrect. ``model`` has its batch on the device before the loop begins: its time is that of the
model and the framework alone.

Each variant has a process, which measures it in each of the `--rounds` passes. The losses are read
at the end, so that no step waits for the one before.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from loader import REPEATS, Kept
from torch import nn
from torch.utils.data import DataLoader, default_collate

import pinstage as ps
from comparison import Args, LoopTimer, Outcome, Program, Row, Variant, importable

FIELDS, WIDTH = 100, 256
SLOW_SECONDS = 0.006
"""The time that a slow source takes for a batch."""

Batch = Any


def pins(way: str, args: Args) -> bool:
    """Return whether a way's loader page-locks its batches."""
    return way == "pin_memory" and args.device.type == "cuda"


def stager(args: Args) -> ps.Stager:
    """Return a stager for the device."""
    return ps.Stager(args.device, max_bytes="8GiB")


class Watch(LoopTimer):
    """Times a loop, and keeps the losses of its steps."""

    def __init__(self, *given: Any, **limits: Any) -> None:
        super().__init__(*given, **limits)
        self._losses: list[torch.Tensor] = []

    def keep(self, loss: torch.Tensor) -> None:
        """Call this after the optimizer's step."""
        self.end()
        self._losses.append(loss.detach())

    def result(self) -> Outcome:
        """Return the outcome, which says the losses. Waits for the device."""
        losses = torch.stack(self._losses).tolist()
        digest = hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest()[:12]
        return self.outcome(
            f"{len(losses)} losses, {losses[0]:.6g} to {losses[-1]:.6g}, sha256 {digest}"
        )


@cache
def nested(fields: int) -> list[Batch]:
    """Return samples of many fields."""
    generator = torch.Generator().manual_seed(0)
    return [
        {f"field_{name:03}": torch.randn(WIDTH, generator=generator) for name in range(fields)}
        | {"label": torch.randn((), generator=generator)}
        for _ in range(128)
    ]


class Dense(nn.Module):
    """Reads every field of a batch, and computes for a while."""

    def __init__(self, fields: int, width: int, depth: int) -> None:
        super().__init__()
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(fields * WIDTH, width), *hidden, nn.Linear(width, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        inputs = torch.cat([leaf for name, leaf in batch.items() if name != "label"], dim=1)
        return nn.functional.mse_loss(self.layers(inputs).squeeze(1), batch["label"])


class Graphs(nn.Module):
    """Passes messages along the edges, with operations that have a deterministic implementation."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        value = self.first(batch.x)
        source, target = batch.edge_index
        for layer in self.layers:
            passed = torch.zeros_like(value).index_add(0, target, value.index_select(0, source))
            value = layer(value + passed / 4).relu()
        pooled = value.new_zeros(len(batch.y), value.shape[1]).index_add(0, batch.batch, value) / 40
        return nn.functional.mse_loss(self.last(pooled).squeeze(1), batch.y)


def on_device(loader: Iterable[Batch], args: Args) -> DataLoader[Batch]:
    """Return a loader of another one's first batch on the device, again and again."""
    batch = ps.Stager(args.device, own_storage=True).to_device(next(iter(loader)))
    # The seed that each new pass over a loader would draw.
    torch.empty((), dtype=torch.int64).random_()
    return DataLoader(Kept([batch], args.steps), batch_size=None)


def nested_loader(way: str, args: Args) -> Any:
    """Return the loader of a variant, before the framework prepares it."""
    dataset = Kept(nested(args.fields), args.steps * args.batch_size)
    return plain_loader(way, args, partial(DataLoader, dataset, args.batch_size))


def plain_loader(way: str, args: Args, loader_class: Callable[..., Any]) -> Any:
    """Return torch's or PyG's loader for a variant."""
    if way == "model":
        return on_device(loader_class(), args)
    return loader_class(
        num_workers=args.workers, pin_memory=pins(way, args), persistent_workers=args.workers > 0
    )


def dense(args: Args) -> nn.Module:
    """Return the model for nested batches, on the device: on the CPU its weights take seconds."""
    with args.device:
        return Dense(args.fields, args.width, args.depth)


def lightning_loop(way: str, args: Args, watch: Watch) -> None:
    """Train with Lightning's trainer."""
    import lightning

    from pinstage.integrations.lightning import StageBatches

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = dense(args)

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            watch.begin()
            loss: torch.Tensor = self.model(batch)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
            watch.keep(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    stages = way.startswith("pinstage")
    trainer = lightning.Trainer(
        accelerator="cpu" if args.device.type == "cpu" else "gpu",
        devices=1 if args.device.type == "cpu" else [args.device.index],
        callbacks=[StageBatches(max_bytes="8GiB", workers=way == "pinstage")] if stages else [],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), nested_loader(way, args))


def accelerate_loop(way: str, args: Args, watch: Watch) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from pinstage.integrations.accelerate import prepare

    accelerator = Accelerator(
        cpu=args.device.type == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=way == "pin_memory"),
    )
    model = dense(args)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    plain = nested_loader(way, args)
    if way == "pinstage":
        loader = prepare(accelerator, plain, max_bytes="8GiB")
    else:
        loader = accelerator.prepare(plain)
    for batch in loader:
        watch.begin()
        loss = model(batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        watch.keep(loss)


def trainer_loop(way: str, args: Args, watch: Watch) -> None:
    """Train with a `Trainer` of transformers."""
    import transformers

    from pinstage.integrations.transformers import StageInputs

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = dense(args)

        def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
            watch.begin()
            self.loss = self.model(batch)
            return {"loss": self.loss}

    class End(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            watch.keep(model.loss)

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return plain if way == "model" else super().get_train_dataloader()

    class Staging(StageInputs, Trainer):
        max_bytes = "8GiB"
        workers = way == "pinstage"

    plain = nested_loader(way, args)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # nothing is saved there
        use_cpu=args.device.type == "cpu",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=pins(way, args),
        dataloader_persistent_workers=args.workers > 0,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["label"],
    )
    trainer_class = Staging if way.startswith("pinstage") else Trainer
    trainer_class(
        Module(), arguments, default_collate, train_dataset=plain.dataset, callbacks=[End()]
    ).train()


def pyg_loop(way: str, args: Args, watch: Watch) -> None:
    """Train on PyG graphs."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    generator = torch.Generator().manual_seed(0)
    kept = []
    for _ in range(128):
        nodes = int(torch.randint(20, 60, (), generator=generator))
        edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        values = torch.randn(nodes, 32, generator=generator)
        kept.append(Data(x=values, edge_index=edges, y=torch.randn(1, generator=generator)))
    with args.device:
        model = Graphs(args.width // 4, args.depth)
    graphs = Kept(kept, args.steps * args.batch_size)
    loader = plain_loader(way, args, partial(GraphLoader, graphs, args.batch_size))
    if way == "pinstage":
        loader = ps.wrap_loader(loader, device=args.device, max_bytes="8GiB")
    train_on(way, loader, args, watch, background="auto", model=model)


def webdataset_loop(way: str, args: Args, watch: Watch) -> None:
    """Train on shards that webdataset reads in workers: one small file, again and again."""
    import webdataset as wds

    with tempfile.TemporaryDirectory() as folder:
        samples = nested(args.fields)
        with wds.TarWriter(f"{folder}/0.tar") as file:
            for index, sample in enumerate(samples):
                *fields, label = sample.values()
                file.write(
                    {
                        "__key__": f"{index:04}",
                        "fields.npy": torch.stack(fields).numpy(),
                        "label.npy": label.numpy(),
                    }
                )
        shards = (args.steps + args.workers) * args.batch_size // len(samples) + 1
        dataset = wds.WebDataset(
            [f"{folder}/0.tar"] * max(shards, args.workers), shardshuffle=False
        )
        dataset = dataset.decode().batched(args.batch_size, named_fields, partial=False)
        if way == "pinstage":
            loader: Any = ps.DataLoader(
                dataset, None, num_workers=args.workers, device=args.device, max_bytes="8GiB"
            )
        elif way == "model":
            loader = on_device(dataset, args)
        else:
            loader = wds.WebLoader(
                dataset, batch_size=None, num_workers=args.workers, pin_memory=pins(way, args)
            )
        train_on(way, loader, args, watch)


def named_fields(samples: Sequence[dict[str, Any]]) -> Batch:
    """Collate decoded samples into a batch as `nested` gives it."""
    fields = default_collate([sample["fields.npy"] for sample in samples]).unbind(1)
    batch = {f"field_{name:03}": values.contiguous() for name, values in enumerate(fields)}
    return batch | {"label": default_collate([sample["label.npy"] for sample in samples])}


def nodes_loop(way: str, args: Args, watch: Watch) -> None:
    """Train on a pipeline of torchdata.nodes."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, PinMemory

    from pinstage.integrations.torchdata import Stage

    dataset = Kept(nested(args.fields), args.steps * args.batch_size)
    node: Any = Batcher(IterableWrapper(range(len(dataset))), args.batch_size)
    node = ParallelMapper(
        node, partial(collated_samples, dataset), num_workers=max(args.workers, 1), method="process"
    )
    if way == "pinstage":
        node = Stage(node, stager(args))
    elif pins(way, args):
        node = PinMemory(node)
    loader: Iterable[Batch] = Loader(node)
    if way == "model":
        loader = on_device(loader, args)
    train_on(way, loader, args, watch)


def collated_samples(dataset: Kept, indices: Sequence[int]) -> Batch:
    """Collate samples, in a process of `ParallelMapper`."""
    return default_collate([dataset[index] for index in indices])


def slow_loop(way: str, args: Args, watch: Watch) -> None:
    """Train on a plain generator, which takes some time for each batch.

    Both variants read ahead in the main process: `pinstage` in a thread, `pinstage_main` without
    one.
    """
    samples = Kept(nested(args.fields), args.batch_size)
    batch = default_collate([samples[index] for index in range(args.batch_size)])

    def batches() -> Iterable[Batch]:
        for _ in range(args.steps):
            time.sleep(SLOW_SECONDS)
            yield {name: leaf.clone() for name, leaf in batch.items()}

    source: Iterable[Batch] = batches()
    if way == "model":
        source = on_device([batch], args)
    elif way == "pinstage":
        source = stager(args).prefetch(source, background=True)
    elif pins(way, args):
        source = ({name: leaf.pin_memory() for name, leaf in each.items()} for each in source)
    train_on(way, source, args, watch, background=False)


def train_on(
    way: str,
    loader: Iterable[Batch],
    args: Args,
    watch: Watch,
    *,
    background: Any = True,
    model: nn.Module | None = None,
) -> None:
    """Train on as many batches as there are steps. Batches on the host are staged, or moved leaf by
    leaf.
    """
    torch.manual_seed(0)  # whatever the loaders have drawn
    model = model or dense(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == "pinstage_main":
        loader = stager(args).prefetch(loader, background=background)
    elif way != "pinstage":
        loader = (moved(batch, args.device) for batch in loader)
    for batch in itertools.islice(loader, args.steps):
        watch.begin()
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.keep(loss)


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return a dict's tensors on a device, or a graph there."""
    if isinstance(batch, dict):
        return {name: leaf.to(device, non_blocking=True) for name, leaf in batch.items()}
    return batch.to(device, non_blocking=True)


@dataclass(frozen=True)
class Case:
    """A loop of a framework."""

    id: str
    package: str
    loop: Callable[[str, Args, Watch], None]
    nbytes: int = 0


CASES = (
    Case("lightning", "lightning", lightning_loop),
    Case("accelerate", "accelerate", accelerate_loop),
    Case("trainer", "transformers", trainer_loop),
    Case("pyg", "torch_geometric", pyg_loop),
    Case("webdataset", "webdataset", webdataset_loop),
    Case("nodes", "torchdata", nodes_loop),
    Case("slow", "torch", slow_loop),
)

VARIANTS = (
    Variant(
        "pin_memory",
        nullcontext,
        "torch's (PyG's) loader with pin_memory=True, moved by the framework",
    ),
    Variant(
        "pinstage",
        nullcontext,
        "packed by the loader's workers: StageBatches, pinstage.integrations.accelerate.prepare, "
        "StageInputs, ps.wrap_loader, ps.DataLoader; integrations.torchdata.Stage; slow: "
        "prefetch(background=True)",
        ours=True,
    ),
    Variant(
        "pinstage_main",
        nullcontext,
        "the plain loader, packed in the main process: StageBatches(workers=False), "
        "Stager.prefetch, StageInputs with workers = False; webdataset, nodes: "
        "prefetch(background=True)",
        ours=True,
        where=lambda case: case.id != "accelerate",
    ),
    Variant("model", nullcontext, "one batch that is on the device before the loop begins"),
)


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return one variant's status in one loop, and its samples in seconds."""
    if not importable(case.package):
        return {"status": "not installed", "detail": case.package}
    torch.manual_seed(0)
    # All ways take as many steps, and so have the same losses.
    watch = Watch(args.device, args.workers, repeats=args.repeats)
    args.steps = watch.steps
    case.loop(variant.id, args, watch)
    return watch.result()


def check_losses(rows: Sequence[Row]) -> None:
    """Mark rows as incorrect if their losses differ from those of ``pin_memory``; ``model`` trains
    on one batch.
    """
    losses = {
        (row.case, row.variant): row.detail.rpartition("; ")[2]
        for row in rows
        if row.status == "ok"
    }
    for row in rows:
        expected = losses.get((row.case, "pin_memory"))
        if (
            row.status == "ok"
            and row.variant != "model"
            and expected is not None
            and losses[row.case, row.variant] != expected
        ):
            row.detail = f"other losses than pin_memory: {row.detail}"
            row.status, row.median, row.p10, row.p90 = "incorrect", None, None, None


def begin(args: Args) -> None:
    """Let each way compute the same bits."""
    warnings.simplefilter("ignore")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # All of it is overwritten anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(1 if args.smoke else torch.get_num_threads())


PROGRAM = Program.of(
    globals(),
    title="ms per step",
    options={
        "repeats": (16, REPEATS),
        "workers": (8, "worker processes"),
        "batch_size": (256, "samples of a batch"),
        "fields": (FIELDS, f"float32 [{WIDTH}] of a sample"),
        "width": (4096, "of the model"),
        "depth": (8, "layers of the model"),
    },
    small={
        "repeats": 4,
        "workers": 1,
        "batch_size": 4,
        "rounds": 1,
        "fields": 3,
        "width": 16,
        "depth": 1,
    },
    rounds=3,
    lasting=True,
    judge=check_losses,
    begin=begin,
)
PROGRAM.run(__name__)
