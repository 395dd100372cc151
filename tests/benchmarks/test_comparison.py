"""The comparison: one table with every installed rival, a result file, a picture, errors in one
line.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from doubles import wait_until
from processes import completed, output_of
from result_files import read

from comparison import batches, harness, plot, record, rivals, staging, table, timing
from comparison.batches import BatchShape
from comparison.command import PROGRAM, chosen_shapes
from comparison.errors import BenchError, Incorrect
from comparison.harness import Size, Variant
from comparison.record import Row

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "results" / "staging.json"
CPU = torch.device("cpu")


def compare(*arguments):
    """Run the comparison as a program; return what it printed."""
    done = completed([sys.executable, ROOT / "benchmarks" / "comparison", *arguments])
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


def a_row(variant, case, median, *, ours=False, leaves=10, nbytes=2560):
    row = Row("staging", case, variant, "ok", ours=ours, leaves=leaves, nbytes=nbytes)
    row.fill([median / 1e3])
    return row


def a_result(rows, **settings):
    return json.loads(json.dumps(record.result_of("staging", settings, rows)))


# -- the comparison --------------------------------------------------------------------------------


def test_a_smoke_run_stages_every_shape(tmp_path):
    out = tmp_path / "results" / "staging.json"
    printed = compare("--smoke", "--out", out)
    result = read(out)
    assert result["settings"]["table"] == [shape.id for shape in batches.SMOKE_SHAPES]
    pairs = [(row["variant"], row["case"]) for row in result["rows"]]
    assert pairs == [
        (variant.id, shape.id)
        for variant in rivals.VARIANTS
        for shape in batches.SMOKE_SHAPES
        if variant.suits(shape)
    ]
    assert [case for variant, case in pairs if variant == "pinstage_lease"] == ["1x64KiB-in-place"]
    obstacles = {variant.id: variant.obstacle(CPU) for variant in rivals.VARIANTS}
    for row in result["rows"]:
        assert row["status"] == (obstacles[row["variant"]] or "ok"), row
        assert row["vs_best_rival"] is None  # on the CPU there is no race
    assert not any(obstacles[name] for name in obstacles if name.startswith("pinstage"))
    assert "\x1b" not in printed  # plain text, where it is not a terminal
    header = ["variant", *(shape.id for shape in batches.SMOKE_SHAPES)]
    assert header in [line.split() for line in printed.splitlines()]


def test_a_missing_rival_is_a_row_saying_so(tmp_path, capsys):
    ghost = Variant("ghost", print, "a rival nobody has", package="no_such_package.inside")
    program = replace(PROGRAM, ways=(*rivals.VARIANTS, ghost))
    out = tmp_path / "staging.json"

    assert program.main(["--smoke", "--only", "ghost,pin_to", "--out", str(out)]) == 0

    statuses = {row["variant"]: (row["status"], row["detail"]) for row in read(out)["rows"]}
    assert statuses == {
        "ghost": ("not installed", "no_such_package.inside"),
        "pin_to": ("needs CUDA", ""),
    }
    shown = capsys.readouterr().out
    cases = "; ".join(shape.id for shape in batches.SMOKE_SHAPES)
    assert f"ghost on {cases}: not installed: no_such_package.inside" in shown
    assert f"pin_to on {cases}: needs CUDA\n" in shown


def test_a_rival_may_need_several_packages():
    present, absent = (
        Variant("way", print, "a rival", package=package)
        for package in ("json torch.nn", "json no_such_package")
    )
    assert present.obstacle(CPU) is None
    assert absent.obstacle(CPU) == "not installed"


RIVAL = """
class start_copy:
    def __init__(self, data, device):
        self.data, self.device = data, device

    def get(self):
        def move(v):
            return {k: move(x) for k, x in v.items()} if isinstance(v, dict) else v.to(self.device)

        return move(self.data)
"""


def test_the_c_rival_is_waited_for(tree, monkeypatch):
    (variant,) = harness.chosen("multi_tensor_copier", rivals.VARIANTS, "variant")
    if variant.obstacle(CPU) is None:
        pytest.skip("the real one is installed, and the smoke run stages with it")

    monkeypatch.syspath_prepend(tree({"accvlab/multi_tensor_copier/__init__.py": RIVAL}))

    assert variant.obstacle(CPU) is None
    args = SimpleNamespace(device=CPU, repeats=2, seconds=0.0)
    outcome = staging.measure(variant, args, BatchShape("9x64B"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "accvlab"]:
        del sys.modules[name]
    assert outcome["status"] == "ok"
    assert len(outcome["total"]) == 2


def test_wrong_bits_are_named_by_their_path():
    batch, other = (batches.build(BatchShape("9x64B"), seed=0) for _ in range(2))
    assert list(batches.differences(batch, other, CPU)) == []

    other["sample_0000"]["stream_1"]["times"][3] += 1

    assert list(batches.differences(batch, other, CPU)) == [
        "sample_0000/stream_1/times: other bytes"
    ]


def chosen(*arguments):
    return chosen_shapes(PROGRAM.parsed(["--device", "cpu", *arguments]))


def test_one_run_measures_the_chosen_batches_and_series():
    tabled, series = chosen("--plot", "p.png")
    published = json.loads(PUBLISHED.read_text())["settings"]["table"]
    assert set(published) <= {shape.id for shape in tabled}
    assert [series["leaves"][0].leaves, series["leaves"][-1].leaves] == [10, 31_623]
    assert [series["bytes"][0].nbytes, series["bytes"][-1].nbytes] == [1 << 10, 1 << 30]
    assert chosen()[1] == {}
    assert chosen("--series", "bytes") == ([], {"bytes": series["bytes"]})
    assert [shape.id for shape in chosen("--batches", "64x1MiB")[0]] == ["64x1MiB"]


def test_a_child_measures_the_series_of_a_picture(tmp_path):
    args = PROGRAM.parsed(["--plot", str(tmp_path / "p.png"), "--smoke"])
    child = PROGRAM.parsed([*PROGRAM.command(args)[2:], "--child", "to"])
    assert child.child == "to"
    assert PROGRAM.chosen_cases(child) == PROGRAM.chosen_cases(args)
    assert len(PROGRAM.chosen_cases(args)) > len(batches.SMOKE_SHAPES)
    assert (child.repeats, child.device) == (args.repeats, CPU)


# -- processes -------------------------------------------------------------------------------------


CASES = [Size("1B", 1), Size("2B", 2)]


def collected(tmp_path, text, variants="v", cases=CASES, **options):
    """Run a script, whose text is given, for each variant; return the rows."""
    script = tmp_path / "child.py"
    script.write_text(text)
    variants = [Variant(name, print, "") for name in variants]
    whole = [sys.executable, str(script)]
    return harness.collect("test", whole, variants, cases, device=CPU, **options)


EMIT = """
import json, sys, time
outcome = {"case": "1B", "way": sys.argv[-1].split(",")[0], "status": "ok", "detail": ""}
print("@outcome " + json.dumps(outcome | {"total": [0.5]}), flush=True)
"""


def test_a_crashing_variant_keeps_rows_and_last_words(tmp_path, capsys):
    first, second = collected(
        tmp_path, EMIT + "sys.stderr.write('x' * 300_000)\nsys.exit('\\nout of luck')\n"
    )

    assert (first.status, first.median) == ("ok", 500.0)
    assert (second.status, second.detail) == ("error", "exit status 1: out of luck")
    assert capsys.readouterr().err.endswith("exit status 1: out of luck\n")


def test_an_error_is_told_with_what_caused_it(monkeypatch, capsys):
    def measure(group):
        raise RuntimeError("worker gone") from ValueError("killed by signal: Bus error")

    monkeypatch.setattr("sys.stdin", ["\n"])
    harness.work([[(Variant("v", print, ""), Size("1B", 1))]], measure, lambda: None)

    said, done = capsys.readouterr().out.splitlines(keepends=True)
    assert done == harness.DONE
    outcome = json.loads(said.removeprefix(harness.MARK))
    assert outcome["detail"] == (
        "RuntimeError: worker gone, from ValueError: killed by signal: Bus error"
    )


PASSES = f"""
import itertools, os, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from comparison import harness

turns = itertools.count(1)

def measure(group):
    turn = next(turns)
    if turn == 3:
        sys.exit("out of luck")
    return {{("v", "1B"): harness.ok([float(turn)])}}

harness.work([[(harness.Variant("v", print, ""), harness.Size("1B", 1))]], measure, lambda: None)
"""


@pytest.mark.parametrize(("lasting", "last"), [(True, 2.0), (False, 1.0)])
def test_a_process_may_last_for_all_passes(tmp_path, lasting, last):
    (row,) = collected(tmp_path, PASSES, cases=CASES[:1], rounds=2, lasting=lasting, unit="s")
    assert (row.repeats, row.minimum, row.maximum) == (2, 1.0, last)


@pytest.mark.parametrize(("within", "repeats"), [(0.0, 1), (3600.0, 3)])
def test_no_pass_begins_that_would_end_too_late(tmp_path, within, repeats):
    (row,) = collected(tmp_path, EMIT, cases=CASES[:1], rounds=3, within=within)
    assert row.repeats == repeats


def test_a_lasting_process_that_ends_is_started_again(tmp_path, capsys):
    (row,) = collected(tmp_path, PASSES, cases=CASES[:1], rounds=4, lasting=True)
    assert (row.status, row.detail) == ("error", "exit status 1: out of luck")
    failed = ["out of luck" in line for line in capsys.readouterr().err.splitlines()]
    assert failed == [False, False, True, False]


def test_parallel_processes_give_the_rows_of_sequential_ones(tmp_path):
    text = EMIT.replace("0.5", "int(sys.argv[-1])")
    rows = collected(tmp_path, text, "12345", CASES[:1], at_once=3, rounds=2, unit="s")
    assert [(row.variant, row.median, row.repeats) for row in rows] == [
        (name, float(name), 2) for name in "12345"
    ]


def test_rows_are_saved_after_each_process(tmp_path):
    kept = []

    def keep(rows, said):
        kept.append((said, [(row.variant, row.repeats) for row in rows]))

    rows = collected(tmp_path, EMIT, "ab", CASES[:1], rounds=2, keep=keep)
    assert kept == [
        ("1 of 4 passes", [("a", 1)]),
        ("2 of 4 passes", [("a", 1), ("b", 1)]),
        ("3 of 4 passes", [("a", 1), ("b", 2)]),
    ]
    assert [(row.variant, row.repeats) for row in rows] == [("a", 2), ("b", 2)]


def test_a_killed_run_leaves_an_incomplete_file(tmp_path):
    out = tmp_path / "killed.json"
    whole = [sys.executable, ROOT / "benchmarks" / "pool_latency.py"]
    whole += ["--smoke", "--device", "cpu", "--rounds", "3", "--out", out]
    with subprocess.Popen(whole, stdout=subprocess.DEVNULL, start_new_session=True) as run:
        try:
            wait_until(lambda: out.exists() or run.poll() is not None)
        finally:
            os.killpg(run.pid, signal.SIGKILL)

    result = read(out)
    assert re.fullmatch(r"\d+ of (12|15) passes", result["incomplete"])
    assert {row["status"] for row in result["rows"]} <= {"ok", "needs CUDA"}
    assert result["rows"]


def test_an_older_incomplete_file_is_shown_as_such(tmp_path, capsys):
    rows = [a_row("to", "a", 4.0), a_row("pinstage_gone", "a", 1.0, ours=True)]
    record.save(tmp_path / "part.json", record.result_of("staging", {}, rows, "9 of 28 processes"))
    assert PROGRAM.main(["--from", str(tmp_path / "part.json")]) == 0
    shown = capsys.readouterr()
    assert "part.json is incomplete: 9 of 28 processes" in shown.err
    assert "pin" not in shown.out.lower()  # a way that is gone
    assert "to" in shown.out.split()


@pytest.mark.parametrize(
    "hang", ["time.sleep(100)\n", "import os\nos.fork() or time.sleep(100)\ntime.sleep(100)\n"]
)
def test_a_variant_that_hangs_is_ended(tmp_path, hang):
    _, second = collected(tmp_path, EMIT + hang, timeout=2.0)

    assert (second.status, second.detail) == ("error", "took more than 2 s")


def test_a_crash_marks_the_rows_that_are_missing(tmp_path):
    rows = collected(tmp_path, EMIT + "sys.exit('out of luck')\n", "ab", in_turn=True)
    assert [(row.variant, row.case, row.status) for row in rows] == [
        ("a", "1B", "ok"),
        ("a", "2B", "error"),
        ("b", "1B", "error"),
        ("b", "2B", "error"),
    ]
    assert {row.detail for row in rows[1:]} == {"exit status 1: out of luck"}


def test_ways_that_run_in_turn_share_a_process(tmp_path):
    kept = []
    text = EMIT.replace("0.5", "float(len(sys.argv[-1]))")
    options = {"in_turn": True, "rounds": 2, "unit": "s", "keep": lambda _, said: kept.append(said)}
    first, *_ = collected(tmp_path, text, "abc", CASES[:1], **options)
    assert (first.repeats, first.median) == (2, len("a,b,c"))
    assert kept == ["1 of 2 passes"]


# -- ways in turn ----------------------------------------------------------------------------------


@pytest.fixture
def calls():
    return []


@pytest.fixture
def way(calls):
    """Return a function that makes a way, which notes its calls."""

    @contextmanager
    def made(name, fails_in=None):
        if fails_in == 0:
            raise ValueError(f"{name} can't be set up")

        def call(given="nothing"):
            calls.append((name, given))
            if [by for by, _ in calls].count(name) == fails_in:
                raise RuntimeError(f"{name} failed")

        yield call
        calls.append((name, "left"))

    return made


def test_ways_alternate_call_by_call(calls, way):
    ways = {name: way(name) for name in "abc"}
    outcomes = timing.in_turn(ways, CPU, repeats=6, warm_ups=2, inputs=[("x",), ("y",)])
    turns = ["".join(name for name, _ in calls[at : at + 3]) for at in range(0, 24, 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) > 2
    assert "".join(given for _, given in calls[:6]) == "xyxyxy"
    assert sorted(calls[24:]) == [(name, "left") for name in "abc"]
    assert [len(outcomes[name]["total"]) for name in "abc"] == [6, 6, 6]


@pytest.mark.parametrize(("fails_in", "error"), [(0, ValueError), (1, RuntimeError)])
def test_a_failing_way_leaves_the_others_turns(calls, way, fails_in, error):
    ways = {"a": way("a"), "b": way("b", fails_in), "c": way("c")}
    outcomes = timing.in_turn(ways, CPU, repeats=3, warm_ups=2)
    assert isinstance(outcomes["b"], error)
    assert [by for by, _ in calls].count("b") == fails_in + (fails_in > 0)  # and it is left
    for name in "ac":
        assert (outcomes[name]["status"], len(outcomes[name]["total"])) == ("ok", 3)


def test_the_time_limit_is_for_each_way(way):
    ways = {name: way(name) for name in "abc"}
    began = time.perf_counter()
    timing.in_turn(ways, CPU, repeats=10**9, seconds=0.01, warm_seconds=0.01)
    assert time.perf_counter() - began >= 0.06


def test_one_call_raises_what_it_raised():
    with pytest.raises(ZeroDivisionError):
        timing.timed(lambda: 1 / 0, CPU, repeats=1)


OF_WAYS = {"right": "ok", "wrong": "incorrect", "raises": "error"}


def test_each_way_in_turn_has_its_row(monkeypatch, capsys):
    def measure(ways, args, case):
        assert [way.id for way in ways] == list(OF_WAYS)
        return {
            "right": harness.ok([1.0]),
            "wrong": Incorrect("tensor 3 has other bits"),
            "raises": ValueError("out of luck"),
        }

    monkeypatch.setattr("sys.stdin", ["\n"])
    ways = [Variant(name, print, "") for name in OF_WAYS]
    program = replace(PROGRAM, ways=ways, cases=CASES[:1], measure=measure, in_turn=True)
    assert program.main(["--child", ",".join(OF_WAYS), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    outcomes = [json.loads(line.removeprefix(harness.MARK)) for line in lines]
    assert {outcome["way"]: outcome["status"] for outcome in outcomes} == OF_WAYS
    assert [outcome["detail"] for outcome in outcomes] == [
        "",
        "tensor 3 has other bits",
        "ValueError: out of luck",
    ]


def test_other_bits_are_incorrect():
    a, b = torch.zeros(3), torch.ones(3)
    timing.compare([a, b], [a, b])
    with pytest.raises(Incorrect, match="tensor 1 has other bits"):
        timing.compare([a, b], [a, a])


# -- what is shown ---------------------------------------------------------------------------------


def test_the_table_has_the_best_rival_s_time(capsys):
    rows = [
        a_row("to", "a", 4.0),
        a_row("to", "b", 1.0),
        a_row("pin_to", "a", 2.0),
        Row("staging", "b", "pin_to", "error", "out of luck"),
        Row("staging", "a", "ghost", "not installed"),
        Row("staging", "b", "ghost", "not installed"),
        a_row("pinstage", "a", 1.0, ours=True),
        a_row("pinstage", "b", 4.0, ours=True),
        a_row("pinstage_lease", "a", 0.5, ours=True),
    ]
    record.compare(rows)

    table.report("ms", rows)

    lines = capsys.readouterr().out.splitlines()
    assert ["variant", "a", "b"] in [line.split() for line in lines]
    assert ["to", *["4", "[4", "..", "4]", "1", "[1", "..", "1]"]] in [
        line.split() for line in lines
    ]
    assert ["pin_to", *["2", "[2", "..", "2]", "error"]] in [line.split() for line in lines]
    begin = lines.index("speed-up over the best rival")
    assert [line.split() for line in lines[begin + 2 : begin + 4]] == [
        ["pinstage", "2", "0.25"],
        ["pinstage_lease", "4", "-"],
    ]
    assert lines[-2:] == ["pin_to on b: error: out of luck", "ghost on a; b: not installed"]


def test_calls_beside_a_busy_gpu_have_a_table(capsys):
    rows = [a_row("to", "a", 4.0), a_row("pinstage", "a", 1.0, ours=True)]
    table.report("ms", rows)
    assert "kernels" not in capsys.readouterr().out
    for row, milliseconds in zip(rows, (100.0, 0.2), strict=True):
        row.fill([row.median / 1e3], [], [milliseconds / 1e3, 0.3, 0.0])
    table.report("ms", rows)
    lines = capsys.readouterr().out.splitlines()
    (begin,) = [i for i, line in enumerate(lines) if "while the GPU has 100 ms of kernels" in line]
    assert [line.split() for line in lines[begin + 1 : begin + 4]] == [
        ["variant", "a"],
        ["to", "100"],
        ["pinstage", "0.2"],
    ]


def test_a_mixed_batch_has_three_dtypes():
    shape = BatchShape("6x64B-mixed")
    assert (shape.leaves, shape.leaf_bytes, shape.nbytes) == (6, 64, 384)
    leaves = []
    batches.map_leaves(batches.build(shape, seed=0), leaves.append)
    assert [leaf.dtype for leaf in leaves] == [torch.float32, torch.int64, torch.uint8] * 2
    assert {leaf.nbytes for leaf in leaves} == {64}


def test_a_series_is_measured_and_drawn_again(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    out, picture, again = tmp_path / "series.json", tmp_path / "series.png", tmp_path / "again.svg"
    compare(
        "--smoke", "--series", "leaves", "--only", "to,pinstage", "--out", out, "--plot", picture
    )
    result = read(out)
    ((name, cases),) = result["settings"]["series"].items()
    assert (name, set(cases)) == ("leaves", {row["case"] for row in result["rows"]})
    for drawn in (picture, tmp_path / "series-dark.png"):
        assert drawn.read_bytes().startswith(b"\x89PNG")

    assert PROGRAM.main(["--from", str(out), "--plot", str(again)]) == 0
    assert b"<svg" in again.read_bytes()


def test_a_picture_combines_series_of_several_files(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    ids = [shape.id for shape in batches.SERIES["bytes"][:2]]
    files = []
    for variant, ours in (("to", False), ("pinstage", True)):
        rows = [
            a_row(variant, case, 1.0 + i, ours=ours, leaves=16, nbytes=1024 * 4**i)
            for i, case in enumerate(ids)
        ]
        files.append(a_result(rows, series={"bytes": ids}))
    drawn = tmp_path / "both.svg"

    plot.draw(files, drawn)

    assert drawn.stat().st_size > 10_000
    assert {row.variant for row in plot._rows_of_series(files, "bytes")} == {"to", "pinstage"}
    with pytest.raises(BenchError, match="no series was measured"):
        plot.draw([a_result([a_row("to", "1000x256B", 1.0)])], drawn)


def test_the_committed_result_is_shown_with_its_ratios(capsys):
    assert PROGRAM.main(["--from", str(PUBLISHED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("speed-up over the best rival")
    assert len(lines[begin + 2].split()) >= 9


@pytest.mark.skipif(shutil.which("git") is None, reason="git isn't installed")
def test_a_commit_is_of_the_file_s_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("PINSTAGE_COMMIT", raising=False)
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e"]
    output_of([*git, "init", "-q"])
    output_of([*git, "commit", "-q", "--allow-empty", "-m", "m"])
    installed = tmp_path / "record.py"
    installed.write_text("")
    monkeypatch.setattr(record, "__file__", str(installed))
    assert record.commit() == "unknown"  # installed inside another repository
    output_of([*git, "add", "record.py"])
    assert re.fullmatch(r"[0-9a-f]{40}-dirty", record.commit())


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "two"], "no such variant: two; known: to, pin_to, "),
        (["--batches", "64x1KiB,7x7B"], "no such batch: 7x7B; known: 1x5KiB, "),
        (["--series", "time"], "no such series: time; known: leaves, bytes, all"),
        (["--device", "gpu"], "unknown device 'gpu': say"),
        (["--device", "cuda:99"], "'cuda:99' is not there: torch sees"),
        (["--plot", "picture.txt"], "picture.txt: a picture is one of .png, .svg, .pdf"),
        (["--out", "."], ". is a folder; name a file"),
        (["--out", "file/inside.json"], "file/inside.json cannot be written: "),
        (["--from", "absent.json"], "absent.json cannot be read: No such file or directory"),
        (["--from", "file"], "file is not JSON: "),
        (["--from", "other.json"], "other.json is not a result of this benchmark"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tree, monkeypatch, capsys, arguments, message):
    files = {"file": "not JSON", "other.json": '{"benchmark": "loader", "rows": []}'}
    monkeypatch.chdir(tree(files))
    assert PROGRAM.main(["--smoke", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"comparison: {message}")
    assert error.count("\n") == 1


def test_without_matplotlib_nothing_is_measured_for_a_picture(monkeypatch, capsys):
    # The import system reads None as "not installed".
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert PROGRAM.main(["--smoke", "--only", "to", "--plot", "p.png"]) == 2
    assert capsys.readouterr().err == (
        "comparison: matplotlib is not installed; run: pip install -e . --group bench\n"
    )


def a_file(path, rows, **changed):
    record.save(path, a_result(rows, variants={row.variant: "" for row in rows}) | changed)
    return str(path)


def test_results_of_different_cases_are_joined(tmp_path, capsys):
    first, second = (
        a_file(tmp_path / f"{case}.json", [a_row("to", case, 4.0), a_row("pinstage", case, 1.0)])
        for case in "ab"
    )
    both = tmp_path / "both.json"
    assert PROGRAM.main(["--from", first, "--from", second, "--out", str(both)]) == 0
    result = json.loads(both.read_text())
    assert [(row["variant"], row["case"]) for row in result["rows"]] == [
        (way, case) for case in "ab" for way in ("to", "pinstage")
    ]
    assert list(result["settings"]["variants"]) == ["to", "pinstage"]


def test_results_of_two_commits_are_not_joined(tmp_path, capsys):
    files = [
        a_file(tmp_path / f"{commit}.json", [a_row("to", "a", 4.0)], commit=commit)
        for commit in "xy"
    ]
    given = [part for file in files for part in ("--from", file)]
    assert PROGRAM.main([*given, "--out", str(tmp_path / "both.json")]) == 2
    assert "--out joins results of one commit and one machine" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--repeats"])
def test_a_number_that_makes_no_run_is_refused(capsys, option):
    with pytest.raises(SystemExit) as exit_:
        PROGRAM.main(["--smoke", option, "0"])
    assert exit_.value.code == 2
    assert f"{option}: 0 is not 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("accv_lab", [None, "elsewhere"])
def test_the_rival_s_build_says_what_it_needs(tmp_path, monkeypatch, accv_lab):
    monkeypatch.delenv("ACCV_LAB", raising=False)
    if accv_lab:
        monkeypatch.setenv("ACCV_LAB", accv_lab)
    monkeypatch.setenv("RIVAL_SITE", str(tmp_path / "rival"))
    done = completed([ROOT / "scripts" / "build_rival.sh"])
    assert done.returncode != 0
    assert "a checkout of" in done.stderr
    assert not (tmp_path / "rival").exists()
