"""Random windows of a file of tokens, gathered into each batch from a memmap.

    python examples/token_windows.py

The file is mapped, not read: `unfold` shows it as overlapping windows, and `ps.rows` stands for
some of them. Inputs and targets are views of one staged tensor. Each batch is compared with the
file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import pinstage as ps


def windows_of(path: Path, length: int) -> torch.Tensor:
    """Return all windows of a file of int32 tokens, which overlap; nothing is read."""
    tokens = torch.from_numpy(np.memmap(path, np.int32, "c"))
    return tokens.unfold(0, length, 1)


def batches(windows: torch.Tensor, size: int, count: int) -> Iterator[ps.Rows]:
    """Yield random windows."""
    for _ in range(count):
        yield ps.rows(windows, torch.randint(len(windows), (size,)))


def main(argv: Sequence[str] | None = None) -> None:
    """Write a file of tokens, and stage random windows of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        np.arange(options.tokens, dtype=np.int32).tofile(path)
        windows = windows_of(path, options.length + 1)
        count = seen = 0
        with ps.Stager(options.device, max_bytes="64MiB") as stager:
            for staged in stager.prefetch(batches(windows, 16, options.batches)):
                inputs, targets = staged[:, :-1], staged[:, 1:]
                seen += bool((targets == inputs + 1).all())
                count += 1
    print(f"{seen} of {count} batches on {options.device} have each token's successor as target")


if __name__ == "__main__":
    main()
