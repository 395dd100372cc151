"""FSDP2 on two CPU processes, each with a pool that is frozen after a warm-up. The GPU tests are in
tests/gpu.
"""

import json
from pathlib import Path

from torchrun import torchrun

STEPS = 40


def test_fsdp2_trains_on_staged_batches_to_equal_losses(tmp_path):
    torchrun(Path(__file__).parents[1] / "helpers" / "fsdp_steps.py", tmp_path, "cpu", STEPS)
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (report["leases"], report["allocations"], report["frees"]) == (STEPS, 0, 0)
        assert len(report["losses"]) == STEPS
        assert report["losses"] == report["expected"]
