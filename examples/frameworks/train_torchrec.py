"""Trains torchrec's DLRM with `TrainPipelineSparseDist`, whose batches are staged ahead.

    python examples/frameworks/train_torchrec.py
    python examples/frameworks/train_torchrec.py --way plain
    torchrun --nproc-per-node 2 examples/frameworks/train_torchrec.py

Both ways have the same losses.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from visits import options, report

import pinstage as ps

KEYS = ["clicks", "buys"]
AHEAD = 3
"""Batches that the pipeline works on at once."""


def batches(count: int, rank: int) -> Iterator[Batch]:
    """Yield ragged batches of eight samples."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        lengths = torch.randint(0, 5, (len(KEYS) * 8,), generator=generator)
        values = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
        sparse = KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths)
        labels = torch.randint(0, 2, (8,), generator=generator)
        yield Batch(torch.rand(8, 4, generator=generator), sparse, labels)


def main() -> None:
    """Run one rank."""
    arguments = options("Trains torchrec's DLRM.", "pinstage").parse_args()
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=key, embedding_dim=8, num_embeddings=100, feature_names=[key])
        for key in KEYS
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    model = DistributedModelParallel(DLRMTrain(DLRM(bags, 4, [16, 8], [8, 1])), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, device)

    stager = ps.Stager(device, max_bytes=arguments.max_bytes)
    losses = []
    for epoch in range(arguments.epochs):
        source: Any = list(batches(10, rank + 10 * epoch))
        found = iter(stager.prefetch(source) if arguments.way == "pinstage" else source)
        while True:
            try:
                loss = pipeline.progress(found)[0]
            except StopIteration:
                break
            losses.append(loss.item())
    report(arguments.out, rank, losses=losses, batches=stager.stats().batches)
    stager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
