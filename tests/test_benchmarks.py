"""The benchmarks run in small, without a GPU, and their result files have one schema."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Make the modules of benchmarks/ importable for one test, and forget them after it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if BENCHMARKS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def run(script, out, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def check_schema(result):
    from record import SCHEMA, STATUSES, Row

    assert result["schema"] == SCHEMA
    assert {"commit", "date", "machine", "versions", "settings"} <= set(result)
    assert {"gpu", "driver", "cuda", "cpu", "cores"} <= set(result["machine"])
    assert {"python", "torch", "numpy", "optree", "pinstage", "tensordict", "spdl-io"} <= set(result["versions"])
    for row in result["rows"]:
        assert set(row) == {field.name for field in fields(Row)}
        assert row["status"] in STATUSES
        assert row["benchmark"] == result["benchmark"]
        if row["status"] == "ok":
            assert row["repeats"] > 0
            assert 0 < row["p10"] <= row["median"] <= row["p90"]
        else:
            assert row["median"] is None


def test_a_smoke_run_stages_every_shape_with_every_variant(scripts, tmp_path):
    from batches import SMOKE_SHAPES
    from rivals import VARIANTS

    result = run("run.py", tmp_path / "staging.json")

    check_schema(result)
    pairs = [(row["variant"], row["case"]) for row in result["rows"]]
    assert pairs == [(variant.id, shape.id) for variant in VARIANTS for shape in SMOKE_SHAPES]
    for row in result["rows"]:
        (variant,) = (variant for variant in VARIANTS if variant.id == row["variant"])
        assert row["status"] == (variant.obstacle(torch.device("cpu")) or "ok"), row
    assert {row["status"] for row in result["rows"] if row["variant"] == "pinstage"} == {"ok"}


@pytest.mark.parametrize("script", ["memory_startup.py", "pool_latency.py"])
def test_the_other_benchmarks_write_the_same_schema(scripts, tmp_path, script):
    result = run(script, tmp_path / "rows.json")

    check_schema(result)
    assert "ok" in {row["status"] for row in result["rows"]}


def test_a_rival_that_is_not_installed_is_a_row_that_says_so(scripts, tmp_path, monkeypatch, capsys):
    import rivals
    import run as benchmark
    from harness import Variant

    ghost = Variant("ghost", rivals._to, "a rival nobody has", package="no_such_package.inside")
    monkeypatch.setattr(rivals, "VARIANTS", (*rivals.VARIANTS, ghost))
    out = tmp_path / "staging.json"

    assert benchmark.main(["--smoke", "--device", "cpu", "--only", "ghost,pin_to", "--out", str(out)]) == 0

    result = json.loads(out.read_text())
    check_schema(result)
    statuses = {row["variant"]: (row["status"], row["detail"]) for row in result["rows"]}
    assert statuses == {"ghost": ("not installed", "no_such_package.inside"), "pin_to": ("needs CUDA", "")}
    assert "not installed" in capsys.readouterr().out


def test_a_variant_that_crashes_is_a_row_with_its_last_words(scripts, tmp_path):
    import harness

    script = tmp_path / "crash.py"
    script.write_text("import sys\nsys.exit('out of luck')\n")
    args = harness.parser(None, repeats=1, repeats_help="").parse_args(["--device", "cpu"])

    (row,) = harness.collect("crash", str(script), [harness.Variant("v", print, "")], [harness.Size("1B", 1)], args)

    assert row.status == "error"
    assert row.detail == "exit status 1: out of luck"


def test_wrong_bits_are_named_by_their_path(scripts):
    import batches

    cpu = torch.device("cpu")
    batch, other = (batches.build(batches.BatchShape(9, 64), seed=0) for _ in range(2))
    assert list(batches.differences(batch, other, cpu)) == []

    other["sample_0000"]["stream_1"]["times"][3] += 1

    assert list(batches.differences(batch, other, cpu)) == ["sample_0000/stream_1/times: other bytes"]
