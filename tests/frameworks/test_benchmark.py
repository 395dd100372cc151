"""The benchmark of frameworks runs with small data, and its variants train to the same losses."""

import importlib
import json
import sys
from pathlib import Path

from processes import output_of
from result_files import check_schema
from torchrun import environment

LOOPS = ("lightning", "accelerate", "trainer", "pyg", "webdataset", "nodes", "slow")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "frameworks.py"


def test_each_variant_trains_to_the_same_losses(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    output_of([sys.executable, BENCHMARK, "--smoke", "--out", out], env=environment())
    result = json.loads(out.read_text())
    check_schema(result)
    losses = {}
    for row in result["rows"]:
        assert row["status"] == "ok"
        idle, _, said = row["detail"].rpartition("; ")
        assert idle.startswith("GPU idle ")
        assert "nan" not in said
        if row["variant"] != "model":
            losses.setdefault(row["case"], set()).add(said)
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    table = importlib.import_module("markdown").frameworks(result).splitlines()
    assert [line.partition(" |")[0] for line in table[4:11]] == [f"| {loop}" for loop in LOOPS]
    assert any("bit for bit" in line for line in table)
    assert {case: len(said) for case, said in losses.items()} == dict.fromkeys(LOOPS, 1)
