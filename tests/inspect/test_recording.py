"""The recording code in the help and the docs gives a trace with its steps, however long the loop
is.
"""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import output_of

from pinstage.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()


def test_the_recording_of_the_docs_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    code = code.replace(", ProfilerActivity.CUDA", "") if not torch.cuda.is_available() else code
    exec(code, {"loader": [torch.ones(2)] * 90, "train_step": lambda batch: batch + 1})
    with gzip.open(tmp_path / "trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"}
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 20


def test_the_benchmark_of_reading_runs_in_small():
    script = Path(__file__).parents[2] / "benchmarks" / "trace_reading.py"
    assert re.search("[12] MB", output_of([sys.executable, script, "--megabytes", "1"]))


def test_the_help_recommends_the_same_recording(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    text = capsys.readouterr().out
    for part in (
        "schedule(wait=5, warmup=5, active=20, repeat=1)",
        'export_chrome_trace("trace.json.gz")',
        "profiler.step()",
    ):
        assert part in PAGE
        assert part in text
