"""The benchmark of frameworks runs in small, and its variants train to the same losses."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from result_files import check_schema
from torchrun import environment

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "frameworks.py"


def test_each_loop_trains_to_the_same_losses_in_every_variant(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARK), "--smoke", "--out", str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    check_schema(result)
    losses = {}
    for row in result["rows"]:
        assert row["status"] == "ok"
        idle, _, said = row["detail"].rpartition("; ")
        assert idle.startswith("GPU idle ")
        assert "nan" not in said
        losses.setdefault(row["case"], set()).add(said)
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    table = importlib.import_module("markdown").frameworks(result).splitlines()
    assert [line.partition(" |")[0] for line in table[4:7]] == ["| lightning", "| accelerate", "| pyg"]
    assert any("bit for bit" in line for line in table)
    assert {case: len(said) for case, said in losses.items()} == {"lightning": 1, "accelerate": 1, "pyg": 1}
