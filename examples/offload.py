"""Train with activations and the optimizer's state on the host, and compare weights with a plain
run bit for bit.

    python examples/offload.py

Both runs print the peak of device memory. The pool has all page-locked memory, within its cap.
Without a GPU the model is smaller, and "device" means pageable memory: the weights can be compared,
the peak can't.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch

import pinstage as ps


class Block(torch.nn.Module):
    """A transformer block: attention, then two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.back = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, tokens, width]``, the shape of the input."""
        q, k, v = (
            self.qkv(self.norms[0](x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.back(torch.nn.functional.gelu(self.wide(self.norms[1](x))))
        return y


def train(args: argparse.Namespace, pool: ps.SlabPool | None) -> tuple[list[torch.Tensor], str]:
    """Train, offloading to the slabs of a pool if there is one; return the weights and a
    summary.
    """
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(args.width, heads=4) for _ in range(args.blocks))).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters())
    around: Any = contextlib.nullcontext()
    if pool is not None:
        around = ps.offload.save_on_cpu(
            pool, min_bytes=args.min_bytes, max_device_bytes=args.max_device_bytes
        )
        ps.offload.optimizer_state(optimizer, pool, min_bytes=args.min_bytes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch, args.tokens, args.width, generator=generator).to(device)
        with around:
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    said = f"loss {loss.item():.6f}"
    if device.type == "cuda":
        said += f", device peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    if pool is not None:
        counted, stats = around.stats(), pool.stats()
        said += (
            f", {counted.copies} tensors sent, {stats.peak_held_bytes / 2**20:.1f} MiB held at the "
            "peak"
        )
    return [parameter.detach() for parameter in model.parameters()], said


def main() -> None:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--blocks", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=1024 if on_gpu else 256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024 if on_gpu else 256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--min-bytes", default="1MiB")
    parser.add_argument("--max-device-bytes", default="1GiB")
    parser.add_argument("--max-bytes", default="16GiB")
    args = parser.parse_args()
    print(
        f"training {args.steps} steps of {args.blocks} blocks on {args.device}, twice ...",
        flush=True,
    )
    expected, said = train(args, None)
    print(f"plain: {said}")
    with ps.SlabPool(
        args.max_bytes, memory=ps.memory.default_memory(torch.device(args.device))
    ) as pool:
        found, said = train(args, pool)
    equal = all(map(torch.equal, found, expected))
    print(f"on the host: {said}; weights as those of the plain run bit for bit: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
