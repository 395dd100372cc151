"""The child process of `pinstage bench`: one variant on some shapes, an outcome a line on stdout."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from pinstage._bench import batches, harness, rivals, staging


def main() -> None:
    """Measure what the parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    (variant,) = harness.chosen(args.child, rivals.VARIANTS, "variant")
    shapes = harness.chosen(args.batches, batches.every_shape(), "batch")
    harness.start_device(device)
    measure = partial(staging.measure, variant, device, args.repeats, args.seconds)
    harness.work([shape for shape in shapes if variant.suits(shape)], measure, partial(staging.empty_caches, device))


if __name__ == "__main__":
    main()
