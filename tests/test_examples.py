"""The examples run as they stand, and show what they claim."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torchrun import torchrun

pytest.importorskip("pandas", reason="the demo's extra is not installed")

DDP = Path(__file__).parents[1] / "examples" / "ddp.py"
MIB = 1 << 20
STEPS = 5


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of two CPU processes reported, by loader."""
    if not torch.distributed.is_gloo_available():
        pytest.fail("this torch has no gloo")
    found = {}
    for loader in ("plain", "pinstage"):
        out = tmp_path_factory.mktemp("ddp") / f"{loader}.json"
        options = {"--device": "cpu", "--loader": loader, "--hours": 8 * STEPS, "--epochs": 2, "--batch-size": 4}
        options |= {"--workers": 1, "--max-bytes": "64MiB/node", "--out": out}
        torchrun(DDP, *(word for option in options.items() for word in option), timeout=60)
        found[loader] = json.loads(out.read_text())
    return found


def test_ddp_trains_to_the_losses_of_the_plain_loader_bit_for_bit(reports):
    plain, ours = ([report["losses"] for report in reports[loader]] for loader in ("plain", "pinstage"))
    assert [len(losses) for losses in ours] == [2 * STEPS, 2 * STEPS]
    assert ours == plain


def test_each_rank_trains_on_hours_of_its_own(reports):
    first, second = (report["losses"] for report in reports["pinstage"])
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_each_rank_has_a_pool_of_its_own(reports):
    first, second = reports["pinstage"]
    assert first["pid"] != second["pid"]
    for report in (first, second):
        assert report["batches"] == report["copies"] == 2 * STEPS
        assert 0 < report["held_bytes"] <= report["max_bytes"] == 32 * MIB  # half of the host's
