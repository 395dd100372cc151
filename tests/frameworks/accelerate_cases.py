"""Runs examples/frameworks/train_accelerate.py in each case and way; one rank of torchrun's."""

import json
import sys
from pathlib import Path

import torch
from accelerate.state import GradientState

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
from train_accelerate import read_options, train

CASES = {
    "plain": [],
    "workers": ["--workers", "2"],
    "dispatch_batches": ["--dispatch-batches"],
    "split_batches": ["--split-batches"],
    "uneven_batches": ["--uneven-batches", "--samples", "54"],
    "even_batches": ["--samples", "50"],
    "skip_first_batches": ["--skip", "5", "--workers", "1"],
    "dispatch_and_skip": ["--dispatch-batches", "--skip", "3"],
    # "stateful": ["--use-stateful-dataloader", "--workers", "1"],
}

if __name__ == "__main__":
    found = {}
    for case, words in CASES.items():
        for way in ("plain", "pinstage"):
            found[f"{case} {way}"] = train(read_options([*words, "--way", way]))
            GradientState._reset_state()
    rank = torch.distributed.get_rank()
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
