"""The scripts of benchmarks/ run with small data, without a GPU; their result files have the
comparison's schema.
"""

import itertools
import json
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import frozen
import loader_refused
import loops
import markdown
import offload
import out
import pytest
import rounding_waste
import torch
from processes import output_of
from result_files import read
from torch.autograd.graph import saved_tensors_hooks

import pinstage as ps
from comparison.errors import Incorrect
from comparison.harness import MARK, Variant, importable
from pinstage._memory import _cuda
from pinstage.errors import StagingWarning

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, out, *arguments):
    options = ("--smoke", "--device", "cpu", "--out", out)
    output_of([sys.executable, BENCHMARKS / script, *options, *arguments])
    return read(out)


LOOPS = [
    *("segmentation, 2 workers", "lidar, 2 workers", "columns, 2 workers", "tokens, 2 workers"),
    *("segmentation, no workers", "lidar, no workers"),
    *("columns, no workers", "tokens, no workers"),
]


def rows_of(result, variant):
    return [row for row in result["rows"] if row["variant"] == variant]


def has_every_loop(result):
    rows = {(row["variant"], row["case"]): row for row in result["rows"]}
    assert list(rows) == [(way.id, case) for way in loops.VARIANTS for case in LOOPS]
    for (way, case), row in rows.items():
        assert row["status"] == ("needs CUDA" if way in ("torch_pin", "prefetch_pin") else "ok")
        assert (row["detail"].startswith("GPU idle ")) is (row["status"] == "ok")
        assert row["nbytes"] == rows["model", case]["nbytes"] > 0
    assert {row["leaves"] for row in result["rows"]} == {2, 16, 120}


def has_results_and_limits(result):
    cases = markdown.by_case(result)
    assert set(cases["results, 8x4B"]) == {
        *("cpu_each", "pinned_each", "by_hand", "bus", "pinstage", "pinstage_copy", "fetch")
    }
    assert "fill" in cases["results, 1x4MiB"]
    for way in ("pinstage", "fetch"):
        row = cases["results, 8x4B"][way]
        assert 0 < row["main_median"] < row["median"]


def has_batches_by_hand(result):
    statuses = {row["variant"]: row["status"] for row in result["rows"]}
    assert statuses == {
        **dict.fromkeys(("to", "borrow", "default", "bus"), "ok"),
        "batch": "needs CUDA",
    }
    assert result["settings"]["in_turn"] is True


@pytest.mark.parametrize("name", ["page_locked", "out"])
def test_a_page_says_that_ways_ran_in_turn(name):
    result = markdown.load(name)
    for in_turn in (False, True):
        result["settings"]["in_turn"] = in_turn
        said = "All ways ran in one process, in turn." in markdown.TABLES[name](result)
        assert said is in_turn


def test_every_way_writes_what_it_was_given():
    class Forgets:
        def __enter__(self):
            return lambda sources, places: places

        def __exit__(self, *_):
            pass

    ways = [*out.VARIANTS[:4], Variant("forgets", lambda *_: Forgets(), "a way")]
    args = SimpleNamespace(device=CPU, repeats=2, seconds=0.0)
    for case in out.SMALL_CASES:
        outcomes = out.measure(ways, args, case)
        assert isinstance(outcomes.pop("forgets"), Incorrect)
        assert [outcome["status"] for outcome in outcomes.values()] == ["ok"] * 4


def has_every_way_of_a_stack(result):
    accelerate = "ok" if importable("accelerate") else "not installed"
    diffusers = accelerate if importable("diffusers") else "not installed"
    stack = markdown.by_case(result)["stack"]
    statuses = {name: row["status"] for name, row in stack.items()}
    names = ("block", "block_recorded", "leaf", "leaf_recorded")
    assert statuses == {
        **dict.fromkeys(("stack_bus", "stack_blocks", "stack_whole"), "ok"),
        **dict.fromkeys((f"diffusers_{name}" for name in names), diffusers),
        "accelerate": accelerate,
    }


def has_rows_of_readers(result):
    packages = {
        "fastsafetensors": "fastsafetensors",
        "streamer": "runai_model_streamer",
        "pinstage_streamer": "runai_model_streamer",
    }
    for way, package in packages.items():
        expected = ("ok", "") if importable(package) else ("not installed", package)
        for variant in (way, f"{way}_buffered"):
            rows = rows_of(result, variant)
            assert [row["case"] for row in rows] == ["cold", "warm"]
            assert {(row["status"], row["detail"]) for row in rows} == {expected}


def has_rows_of_torchtune(result):
    rows = rows_of(result, "torchtune")
    assert [row["case"] for row in rows] == ["first step", "later steps"]
    has_it = importable("torchtune") and importable("torchao")
    expected = "needs CUDA" if has_it else "not installed"
    assert {row["status"] for row in rows} == {expected}


def becomes_its_table(result, name, page, expected, folder, monkeypatch):
    table = markdown.TABLES[name](result)
    assert "none" not in table.lower()
    assert f"\n{table}".count(f"\n{expected}") in (1, 2)  # short, and unfolded
    for line in table.splitlines():
        assert not line.startswith("|") or line.count("|") >= 5

    marker = f"<!-- table: {name} -->\n"
    text = (BENCHMARKS.parent / "docs" / page).read_text()
    assert marker in text
    monkeypatch.setattr(markdown, "RESULTS", folder)
    on_page = f"{marker}\n<!-- end -->"
    file = folder / f"{name}.json"
    file.write_text(json.dumps(result | {"machine": result["machine"] | {"gpu": "X"}}))
    assert expected in markdown.filled(on_page)
    gone = result["rows"][0]["variant"]
    killed = {"incomplete": "3 of 4 processes"}
    killed["rows"] = [row for row in result["rows"] if row["variant"] != gone]
    file.write_text(json.dumps(result | killed))
    with pytest.raises(
        ValueError, match=rf"^{name}\.json is incomplete: 3 of 4 processes; run it to its end"
    ):
        markdown.filled(on_page)
    file.unlink()
    assert markdown.filled(on_page) == on_page  # pages stand without the file


@pytest.mark.parametrize(
    ("name", "page", "expected"),
    [
        ("memory_startup", None, None),
        ("page_locked", "performance.md", "| 1 x 128KiB | "),
        ("page_locking", "guides/large_host_memory.md", "| first byte, s | "),
        ("pool_latency", None, None),
        ("to_host", None, None),
        ("out", "guides/fixed_addresses.md", "| 4MiB-weights | "),
        ("checkpoint", "guides/checkpoints.md", "| `CheckpointStager()` | "),
        ("offload", "guides/offload.md", "| `ps.offload.save_on_cpu(pool)` | "),
        ("frozen", "guides/frozen_modules.md", "| `ps.offload.frozen_module(module, pool)` | "),
        ("weights", "guides/weights.md", "| with pairs of a mapped file | "),
        ("in_memory", "guides/data_in_memory.md", "| 13 floats, label | "),
        ("rounding_waste", None, None),
        ("refusals", "guides/limits.md", "| 5% of what 4 batches need can be page-locked | "),
        ("loops", "measurements.md", "| tokens, no workers | "),
    ],
)
def test_a_result_file_becomes_its_page_s_table(tmp_path, monkeypatch, name, page, expected):
    result = run(f"{name}.py", tmp_path / "rows.json")

    assert "ok" in {row["status"] for row in result["rows"]}
    has_rows = {
        "loops": has_every_loop,
        "to_host": has_results_and_limits,
        "page_locked": has_batches_by_hand,
        "frozen": has_every_way_of_a_stack,
        "weights": has_rows_of_readers,
        "offload": has_rows_of_torchtune,
    }
    if name in has_rows:
        has_rows[name](result)
    if page is not None:
        becomes_its_table(result, name, page, expected, tmp_path, monkeypatch)


@pytest.fixture
def measured_stack():
    """Return a function that measures a way of running a small stack on the CPU."""

    def measured(run):
        variant = Variant("way", lambda stack, _: nullcontext(partial(run, stack)), "a way")
        args = SimpleNamespace(repeats=3, device=CPU)
        return frozen.measure_stack(variant, args, frozen.SMOKE_STACK)

    return measured


def test_a_stack_s_plain_output_is_right(measured_stack):
    outcome = measured_stack(lambda stack, x: stack(x))
    assert (outcome["status"], outcome["detail"]) == ("ok", "device peak 0.00 GB")
    assert len(outcome["total"]) == 3


def test_one_differing_output_makes_a_stack_incorrect(measured_stack):
    passes = itertools.count()
    outcome = measured_stack(lambda stack, x: stack(x) + (next(passes) == 1))
    assert outcome["status"] == "incorrect"
    assert outcome["detail"].endswith("; 1 of 4 results are wrong")


def test_each_block_s_weights_count(measured_stack):
    def shuffled(stack, x):
        for block in [stack.blocks[0], *stack.blocks[2:], stack.blocks[1]]:
            x = block(x)
        return stack.norm(x)

    assert measured_stack(shuffled)["status"] == "incorrect"


def test_a_stack_has_the_bytes_of_its_case():
    stack = frozen.make_stack(frozen.SMOKE_STACK)
    nbytes = sum(parameter.nbytes for parameter in stack.blocks.parameters())
    assert nbytes == frozen.SMOKE_STACK.nbytes


def test_the_table_of_frozen_modules_has_the_stack():
    result = markdown.load("frozen")
    about = result["settings"]["variants"]
    for row in result["rows"]:
        if row["case"] == "stack":
            del about[row["variant"]]
    result["rows"] = [row for row in result["rows"] if row["variant"] in about]
    ways = {
        "stack_bus": ("ok", 64.0, "device peak 0.21 GB"),
        "stack_blocks": ("ok", 80.0, "device peak 0.52 GB"),
        "diffusers_block": ("incorrect", None, "device peak 0.53 GB; 6 of 6 outputs differ"),
        "accelerate": ("not installed", None, "accelerate"),
    }
    for name, (status, median, detail) in ways.items():
        row = {"case": "stack", "variant": name, "status": status, "detail": detail, "repeats": 3}
        row |= {"ours": name == "stack_blocks", "median": median, "gb_per_s": None}
        result["rows"].append(row)
        about[name] = f"way {name}"
    lines = markdown.frozen(result).splitlines()
    assert [line for line in lines if line.startswith("| way ")] == [
        "| way stack_bus | 64 | - | 1 | 0.21 GB |",
        "| way stack_blocks | 80 | - | 1.25 | 0.52 GB |",
        "| way diffusers_block | incorrect | incorrect | - | 0.53 GB |",
        "| way accelerate | not installed | not installed | - | - |",
    ]


def test_the_loader_benchmark_has_all_rows(tmp_path):
    result = run("loader.py", tmp_path / "loader.json", "--only", "torch_to,spdl,pinstage")

    parts = ["ready", "step", "decode"]
    for way in ("torch_to", "pinstage", "spdl"):
        rows = rows_of(result, way)
        assert [row["case"].partition(":")[0] for row in rows] == parts
        assert {row["status"] == "ok" for row in rows} == {way != "spdl"}  # which needs CUDA
    assert "GPU idle" in result["rows"][1]["detail"]


def test_the_loader_benchmark_has_refused_memory(tmp_path):
    result = run("loader_refused.py", tmp_path / "loader.json")

    assert result["benchmark"] == "loader_refused"
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows.pop("torch_pin")["status"] == "needs CUDA"
    assert list(rows) == ["pinstage", "pinstage_refused", "pinstage_third"]
    for row in rows.values():
        assert row["status"] == "ok"
        assert "0 page-locked" in row["detail"]
        assert "after 20 more batches" in row["detail"]
    table = markdown.TABLES["loader_refused"](result).splitlines()
    assert table[2] == "| ms | 8 x 8 KiB |"
    assert table[6].startswith("| the same where CUDA refuses to register memory | ")


def test_registering_may_be_refused_from_the_third_on(monkeypatch):
    from cuda.bindings import runtime

    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: (0,))
    for _ in range(2):  # refusals don't add up
        with loader_refused.registering_refused(2, "cudaErrorInvalidValue"):
            results = [runtime.cudaHostRegister(1 << 20, 4096, 1)[0] for _ in range(4)]
        assert [int(result) for result in results] == [0, 0, 1, 1]


def test_registering_is_refused_as_by_a_platform(cuda, monkeypatch):
    from cuda.bindings import runtime

    monkeypatch.setattr(_cuda, "_bindings", _cuda.Bindings(runtime, cuda))
    memory = ps.memory.SharedMemory(0)
    text = r"shared memory isn't page-locked here: .*NotSupport"
    with loader_refused.registering_refused(), pytest.warns(StagingWarning, match=text):
        block = memory.allocate(5 << 14)

    assert not block.is_pinned
    memory.deallocate(block)


CPU = torch.device("cpu")
ONE_STEP = SimpleNamespace(device=CPU, repeats=1, seconds=0.0, smoke=True)


@pytest.mark.parametrize(
    ("is_changed", "wrong"),
    [
        (lambda tensor: False, None),
        (lambda tensor: tensor.dim() > 2, "those of a plain step with attention"),
        (
            lambda tensor: True,
            "those of a plain step and those of a plain step with attention",
        ),
    ],
)
def test_offloading_that_changes_gradients_is_incorrect(is_changed, wrong):
    @contextmanager
    def changed(training, case):
        def pack(tensor):
            return tensor * 2 if is_changed(tensor) else tensor

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        yield lambda: training.step(hooks, training.forward), str

    way = Variant("changed", changed, "a way")
    expected = pytest.raises(Incorrect, match=f"^other gradients than {wrong}$")
    with expected if wrong else nullcontext():
        outcomes = offload.measure_steps(way, ONE_STEP, offload.SMOKE_STEPS[0])
        assert [outcomes[case.id]["status"] for case in offload.SMOKE_STEPS] == ["ok", "ok"]


def test_later_steps_after_a_failure_are_errors(monkeypatch, capsys):
    @contextmanager
    def fails_with_attention(training, case):
        if case.attends:
            raise RuntimeError("attention")
        yield lambda: training.step(nullcontext(), training.forward), str

    way = Variant("fails", fails_with_attention, "a way")
    monkeypatch.setattr("sys.stdin", ["\n"])
    program = replace(offload.PROGRAM, ways=[way], small_cases=offload.SMOKE_STEPS)
    assert program.main(["--child", "fails", "--smoke", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    outcomes = [json.loads(line.removeprefix(MARK)) for line in lines]
    assert [(outcome["case"], outcome["detail"]) for outcome in outcomes] == [
        (case.id, "RuntimeError: attention") for case in offload.SMOKE_STEPS
    ]


def test_memory_that_grows_is_an_error():
    def stats():
        return SimpleNamespace(pool=SimpleNamespace(pinned_bytes=0, held_bytes=len(taken) << 24))

    taken = []
    batches = (taken.append(number) for number in range(100))
    (case,) = loader_refused.SMALL_CASES
    growing = SimpleNamespace(stats=stats)
    found = loader_refused.watched(growing, batches, case, CPU)
    assert found["status"] == "error"
    assert len(taken) == case.watched * 11 // 10


def test_each_batch_compared_is_of_one_kind():
    for row in markdown.load("staging")["rows"]:
        if not row["case"].endswith("in-place"):
            sizes = row["leaves"], row["nbytes"] / row["leaves"]
            assert [matches(*sizes) for matches, _ in markdown.GAINS.values()].count(True) == 1


def test_the_table_of_loops_has_spread_and_utilisation():
    result = markdown.load("loops")
    ways = {
        "torch_pin": 16,
        "torch_to": 20,
        "thread": 12,
        "prefetch": 10,
        "pinstage": 8,
        "model": 7,
    }
    result["rows"] = [
        row
        | {"median": median, "minimum": median * 0.75, "maximum": median * 1.125, "repeats": 3}
        | {"detail": "GPU idle 60.0% of 160 timed steps"}
        for row in result["rows"]
        if row["case"] == "tokens, no workers" and (median := ways.get(row["variant"]))
    ]
    result["settings"]["variants"] = {name: f"way {name}" for name in ways}
    table = markdown.loops(result).splitlines()
    assert table[2] == "| tokens, no workers | 16 | 20 | **8** | **10** | 7 | 1.05 MB, 2 tensors |"
    assert "| way thread | **12** (9 to 13.5), busy 40% |" in table
    assert "| way pinstage | **8** (6 to 9), busy 40% |" in table
    said = next(line for line in table if "Medians" in line)
    assert "Medians of 3 alternating passes of at least 160 steps; a pass differs" in said
    assert "by at most 25%." in said
    assert "- `tokens`: 2 tensors of 16 x 4,096 integers." in table


def test_a_killed_run_with_every_way_is_shown(tmp_path, monkeypatch):
    result = markdown.load("loops") | {"incomplete": "3 of 9 processes"}
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    for row in result["rows"]:
        row["repeats"] = 1 if row["variant"] == "model" else 2
    (tmp_path / "loops.json").write_text(json.dumps(result))
    assert re.search(
        r"Medians of 1 or 2 alternating passes of at least \d+ steps;", markdown.loops()
    )


def test_frameworks_say_which_way_failed():
    result = markdown.load("frameworks")
    for row in result["rows"]:
        row |= {"status": "ok", "median": 1.0, "repeats": 1}
        row["detail"] = "GPU idle 0.0% of 160 timed steps; 32 losses, 0.9 to 0.8"
    assert "Losses are the same" in markdown.frameworks(result)
    result["rows"][0] |= {
        "status": "error",
        "median": None,
        "detail": "E: workers (pid(s) 12, 34) exited",
    }
    text = markdown.frameworks(result)
    assert "failed: E: workers exited." in text
    assert "Losses" not in text
    assert "A single pass of at least 160 steps." in text


def a_loop(name, way, median, nbytes=4_000_000, **more):
    row = {"case": name, "variant": way, "status": "ok", "detail": "GPU idle 60.0% of 9 timed"}
    return row | {"median": median, "nbytes": nbytes, "leaves": 2, "repeats": 3} | more


def picture_of(monkeypatch, *rows):
    """Return the picture where all loops have the same rows."""
    result = markdown.load("loops")
    names = dict.fromkeys(case.name for case in loops.CASES)
    result["rows"] = [row | {"case": f"{name}, {row['case']}"} for name in names for row in rows]
    monkeypatch.setattr(markdown, "load", lambda name: result)
    picture = markdown.loops_picture()
    for name in names:
        assert markdown.LOOP_BATCHES[name] in picture
    return picture


def test_the_picture_has_the_best_ways_of_both(monkeypatch):
    picture = picture_of(
        monkeypatch,
        *(a_loop("8 workers", way, 20) for way in ("torch_pin", "torch_to")),
        a_loop("8 workers", "pinstage", 2),
        *(a_loop("no workers", way, median) for way, median in [("torch_pin", 8), ("torch_to", 6)]),
        a_loop("no workers", "pinstage", 3),
    )
    assert picture.count(">3.0x<") == len(markdown.LOOP_BATCHES)
    assert "torch: no workers; pinstage: 8 workers" in picture
    assert ">tokens: 4 MB, 2 tensors<" in picture
    assert "167 steps/s, GPU busy 40%" in picture


@pytest.mark.parametrize("nbytes", [2_000_000, 0])
def test_the_picture_leaves_out_other_batch_sizes(monkeypatch, nbytes):
    with_workers = 4_000_000 if nbytes else 0  # older files don't say it
    picture = picture_of(
        monkeypatch,
        a_loop("8 workers", "torch_pin", 20, with_workers),
        a_loop("8 workers", "pinstage", 2, with_workers),
        a_loop("no workers", "torch_pin", 8, nbytes),
        a_loop("no workers", "pinstage", 3, nbytes),
    )
    assert picture.count(">10.0x<") == len(markdown.LOOP_BATCHES)
    assert "torch: 8 workers, pin_memory; pinstage: 8 workers" in picture


def bold(*spreads, field="median"):
    """Return the numbers of the ways that are bold, by their medians and spreads."""
    rows = {
        str(number): {field: median, "repeats": 3, "minimum": low, "maximum": high, "status": "ok"}
        for number, (low, median, high) in enumerate(spreads)
    }
    texts = markdown.cells(rows, rows, field)
    return [number for number, text in enumerate(texts) if text.startswith("**")]


def test_bold_is_the_best_of_a_row():
    assert bold((34, 34.7, 36), (30, 31.5, 33)) == [1]
    assert bold((9, 9.24, 10), (4, 4.54, 5), (9, 9.3, 10)) == [1]


def test_overlapping_ways_are_both_bold_or_none():
    assert bold((1, 2, 3), (2.5, 3, 4), (5, 6, 7)) == [0, 1]
    assert bold((1, 2, 3), (2.5, 3, 4)) == []


def test_a_limit_isn_t_bold():
    ours = {"median": 2.0, "repeats": 1, "status": "ok"}
    rows = {"bus": ours | {"median": 1.0}, "to": ours | {"median": 3.0}, "pinstage": ours}
    assert markdown.cells(rows, rows) == ["1", "3", "**2**"]


def test_loops_say_what_they_move():
    result = markdown.load("loops")
    for row in result["rows"]:
        row |= {"nbytes": 51_904_512, "leaves": 2}
    lines = markdown.short_loops(result)
    assert lines[0].endswith(" | a batch |")
    assert lines[2].endswith(" | 51.9 MB, 2 tensors |")


def test_results_have_a_table_with_when_fetch_returns(tmp_path):
    result = markdown.load("to_host")
    result["rows"] = [row for row in result["rows"] if not row["case"].startswith("results, ")]
    assert markdown.results(result) == ""  # of older files
    row = {"status": "ok", "detail": "", "repeats": 3, "case": "results, 8x4B"}
    medians = {"cpu_each": 0.08, "pinned_each": 0.09, "pinstage_copy": 0.1, "pinstage": 0.2}
    result["rows"] += [row | {"variant": way, "median": at} for way, at in medians.items()]
    result["rows"].append(row | {"variant": "fetch", "median": 0.3, "main_median": 0.05})
    table = markdown.results(result).splitlines()
    assert table[2] == (
        "| tensors | `.cpu()` each | pinned `copy_` | gathered | `to_host` | views | new memory | `fetch` |"
    )
    assert table[4] == "| 8 x 4B | **0.08** | 0.09 | - | 0.1 | 0.2 | - | 0.05 |"
    assert "results, " not in markdown.to_host(result)


def test_doctor_s_output_is_drawn_for_dark_pages(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(markdown, "BANDWIDTH", tmp_path / "bandwidth.png")
    monkeypatch.setattr(markdown, "save_plot", lambda *given, **said: drawn.append((*given, said)))
    markdown.draw_bandwidth()
    ((points, path, said),) = drawn
    assert path == tmp_path / "bandwidth-dark.png"
    assert said == {"title": "NVIDIA H100", "link_rate": 63e9}
    assert len(points) == 42  # two directions, seven sizes, three kinds
    seconds = pytest.approx((256 << 20) / 55.1e9)
    assert points[-1] == ("device to host", "registered", 256 << 20, seconds)


def test_of_the_demo_s_batches_little_is_waste():
    (variant,) = (variant for variant in rounding_waste.VARIANTS if variant.id == "pinstage")
    in_all, of_batches = rounding_waste.shares(variant, torch.device("cpu"), 200)

    assert in_all <= 0.06
    assert sum(of_batches) / len(of_batches) <= 0.06
    assert max(of_batches) <= 0.125
