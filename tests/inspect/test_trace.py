"""Reports on traces: each figure of small traces with known figures, and clear errors for files
that aren't traces.
"""

import gzip
import json
import re
from itertools import product

import pytest
from trace_maker import BASE_US, THREAD, TraceMaker, naive_loop

from pinstage.errors import TraceError
from pinstage.inspect import Bus
from pinstage.inspect._bus import REFERENCE
from pinstage.inspect._report import TextTable, as_rich, as_text
from pinstage.inspect._trace import _analysis, _events, trace_report

US = 1e-6
ADDED = 3 * _analysis.EVENT_UNITS * _analysis.UNIT_SECONDS
"""Time that the profiler adds to an operator with a CUDA call, if the trace doesn't measure it."""
approx = pytest.approx


@pytest.fixture
def report(tmp_path):
    """Return a function that writes a trace and reports on it."""

    def of(trace, name="trace.json", **options):
        return trace_report(trace.write(tmp_path / name), **options)

    return of


@pytest.fixture
def analysis(report):
    return lambda trace: report(trace).analysis


# -- copies ----------------------------------------------------------------------------------------


def test_copies_are_told_apart_by_direction_and_kind(analysis):
    trace = (
        TraceMaker()
        .copy(0, 10, 1000)
        .copy(20, 10, 3000)
        .copy(40, 5, 8000, kind="Pinned")
        .copy(60, 5, 64, way="DtoH")
        .copy(70, 5, 512, way="DtoD")
        .add("gpu_memcpy", "of another kind", 80, 5)
    )
    groups = analysis(trace).groups
    # Copies to the device come first.
    assert [(group["direction"], group["kind"], group["copies"]) for group in groups] == [
        ("HtoD", "pageable", 2), ("HtoD", "pinned", 1), ("DtoH", "pageable", 1),
        ("DtoD", "device", 1), ("other", "unknown", 1),
    ]  # fmt: skip
    pageable = groups[0]
    assert pageable["nbytes"] == 4000
    assert pageable["seconds"] == approx(20 * US)
    assert pageable["bytes_per_second"] == approx(4000 / (20 * US))


@pytest.mark.parametrize(
    ("trace", "hidden", "exposed"),
    [
        # Kernels until 15, the copy from 10 to 30.
        (TraceMaker().kernel(0, 10).kernel(5, 10).copy(10, 20, 1000), 5, 15),
        (TraceMaker().kernel(0, 100, device=1).copy(10, 20, 1000, device=0), 0, 20),
        (TraceMaker().kernel(0, 100, device=1).copy(10, 20, 1000, device=1), 20, 0),
        (TraceMaker().copy(0, 10, 1).copy(5, 10, 1), 0, 15),  # overlapping copies count once
    ],
)
def test_time_beside_kernels_is_hidden_the_rest_exposed(analysis, trace, hidden, exposed):
    (group,) = analysis(trace).groups
    assert group["seconds"] == approx(20 * US)
    assert group["hidden_seconds"] == approx(hidden * US)
    assert group["exposed_seconds"] == approx(exposed * US)


# -- the host --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            _events.CALL_COPY,
            ["cudaMemcpyAsync", "cudaMemcpy", "hipMemcpyWithStream", "cuMemcpyHtoDAsync_v2"],
        ),
        (
            _events.CALL_PIN,
            [
                "cudaHostAlloc", "cudaMallocHost", "cudaHostRegister", "cudaFreeHost",
                "cudaHostUnregister", "hipHostMalloc", "cuMemHostAlloc", "cuMemAllocHost_v2",
            ],
        ),
        (
            _events.CALL_SYNCHRONISE,
            ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"],
        ),
        (
            _events.CALL,
            [
                "cudaLaunchKernel", "cudaMalloc", "cuMemAlloc_v2", "cudaMemsetAsync",
                "cudaStreamWaitEvent", "cudaEventQuery",
            ],
        ),
    ],
)  # fmt: skip
def test_host_calls_are_known_by_their_names(kind, names):
    assert [name for name in names if _events.kind_of(_events.CALL, name) != kind] == []


# -- steps -----------------------------------------------------------------------------------------


def one_step():
    return TraceMaker().step(1, 0, 100).kernel(90, 10)


STEPS = {
    "the operator around a copy to the device is staging": (
        one_step().op("aten::to", 10, 30).op("aten::copy_", 12, 25).copy(20, 2, 64, asked=15),
        {"staging": 30, "stall": 30},
    ),
    "an operator without one isn't": (
        one_step()
        .op("aten::to", 10, 30)
        .op("aten::copy_", 50, 20)
        .copy(55, 2, 64, way="DtoH", asked=52),
        {"staging": 0, "copy": 2},
    ),
    "pinning in the loop is staging": (
        one_step().op("aten::pin_memory", 8, 30).call("cudaHostAlloc", 10, 20),
        {"staging": 30},
    ),
    "pinning in another thread isn't": (
        one_step().call("cudaHostAlloc", 10, 20, tid=THREAD + 1),
        {"staging": 0},
    ),
    "waiting for the device outside staging is synchronisation": (
        one_step()
        .op("aten::to", 0, 30)
        .copy(5, 2, 64, asked=2)
        .call("cudaStreamSynchronize", 10, 10)
        .call("cudaStreamSynchronize", 50, 10),
        {"synchronise": 10},
    ),
    "pinstage's ranges are staging and waits": (
        one_step()
        .add("user_annotation", "pinstage.pack", 10, 15)
        .add("user_annotation", "pinstage.loader.wait", 50, 7),
        {"staging": 15, "wait": 7},
    ),
    "a stall is staging without a kernel": (
        one_step().op("aten::to", 0, 40).copy(30, 20, 64, asked=10).kernel(0, 35),
        # The operator until 40, the copy until 50.
        {"kernel": 45, "staging": 50, "stall": 15, "copy": 20},
    ),
    "a short gap between kernels can't be saved": (
        TraceMaker().step(1, 0, 100).kernel(0, 20).kernel(22, 20).kernel(60, 20),
        {"kernel": 62},
    ),
    "an annotation of the device isn't a step": (
        one_step().add("gpu_user_annotation", "ProfilerStep#1", 5, 99, pid=0, tid=7),
        {"kernel": 10},
    ),
    "the figures are those of the busiest device": (
        one_step().kernel(0, 50, device=3),
        {"kernel": 50},
    ),
}


@pytest.mark.parametrize(("trace", "figures"), STEPS.values(), ids=STEPS)
def test_a_step_has_the_figures_of_its_events(analysis, trace, figures):
    (step,) = analysis(trace).steps
    found = {name: step[f"{name}_seconds"] for name in figures}
    assert found == {name: approx(us * US) for name, us in figures.items()}


def test_a_copy_belongs_to_the_requesting_step(analysis):
    trace = TraceMaker().step(1, 0, 100).step(2, 100, 100).copy(150, 10, 64, asked=90).kernel(0, 1)
    first, second = analysis(trace).steps
    assert (first["copies"], first["nbytes"], second["copies"]) == (1, 64, 0)
    assert second["copy_seconds"] == approx(10 * US)  # and runs in the next one


def test_steps_are_ordered_by_time_with_their_numbers(analysis):
    trace = TraceMaker().step(8, 100, 50).step(7, 0, 100).kernel(0, 1).wait(20, 30)
    found = analysis(trace)
    names = "number", "seconds", "wait_seconds"
    steps = [[step[name] for name in names] for step in found.steps]
    assert steps == [[7, approx(100 * US), approx(30 * US)], [8, approx(50 * US), 0]]
    assert found.annotated


def test_without_annotated_steps_the_whole_trace_is_one(analysis):
    found = analysis(TraceMaker().kernel(10, 20).copy(50, 50, 64))
    assert not found.annotated
    (step,) = found.steps
    assert (step["number"], step["copies"], step["seconds"]) == (-1, 1, approx(90 * US))


# -- model and verdict -----------------------------------------------------------------------------


def waiting_loop(**options):
    """Return a loop that stages leaf by leaf, trains, and waits for its loss in each step."""
    trace = naive_loop(**options)
    for event in [event for event in trace.events if event["cat"] == "kernel"]:
        trace.call("cudaStreamSynchronize", event["ts"] - BASE_US + 1, event["dur"] - 1)
    return trace


def test_many_small_calls_are_profiler_cost(report):
    """For example, 100 leaves of 20 us, with 15 us of them spent by the profiler on thirty
    operators.
    """
    trace = naive_loop(leaves=100)
    few = report(trace).packing
    for step in range(6):
        for index in range(100 * 30):
            trace.op("aten::empty", step * 4000 + index * 2000 / 3000, 0.1)
    many = report(trace).packing
    assert few.saved_seconds > 1.3e-3
    assert many.saved_seconds < few.saved_seconds - 1.2e-3


def test_a_given_step_reveals_the_profiler_s_cost(report):
    trace = waiting_loop(leaves=100, kernel_us=2000)  # 4 ms
    given = report(trace, step_seconds=3.5e-3).packing
    assert given.real_seconds == approx(3.5e-3)
    assert given.saved_seconds == approx(2e-3 - 0.5e-3 - given.packed_seconds, abs=1e-5)
    assert "a step takes 3.50 ms, as given" in " ".join(given.assumptions())
    loose = report(trace).packing
    width = loose.most_saved_seconds - loose.least_saved_seconds
    assert given.most_saved_seconds - given.least_saved_seconds < width


def test_unexplained_cost_of_a_step_is_the_host(report):
    """For example, a loop with a large copy that takes 4 ms, and took 8 ms when traced."""
    trace = TraceMaker()
    for start in trace.steps(4, 9000):
        trace.op("aten::to", start, 8000)
        trace.copy(start + 10, 7900, 32 << 20, asked=start + 5, call_lasts=7900)
        trace.kernel(start + 8000, 1000).call("cudaStreamSynchronize", start + 8001, 999)
    found = report(trace, step_seconds=5e-3).packing
    assert found.real_staging_seconds == approx(4e-3, rel=0.01)
    assert found.saved_seconds == approx(4e-3 - found.packed_seconds, rel=0.01)


def test_the_trace_measures_the_profiler_s_cost(report):
    def traced(unit_us):
        trace = naive_loop(leaves=100)
        for event in [event for event in trace.events if event["name"] == "aten::to"]:
            trace.op("aten::_to_copy", event["ts"] - BASE_US + unit_us, 18)
        return report(trace)

    quick, slow = traced(0.2), traced(0.8)
    assert slow.analysis.event_seconds == approx(_analysis.EVENT_UNITS * 0.8 * US, rel=0.01)
    assert quick.analysis.event_seconds == approx(_analysis.EVENT_UNITS * 0.2 * US, rel=0.01)
    assert slow.packing.real_seconds < quick.packing.real_seconds


def loop_ahead(*, host_us, kernel_us):
    """Return a loop that never waits: the host issues copies while the GPU works."""
    trace, lasts = TraceMaker(), max(host_us + 100, kernel_us)
    for start in trace.steps(4, lasts):
        trace.kernel(start + lasts - kernel_us, kernel_us)
        for leaf in range(100):
            at = start + leaf * host_us / 100
            trace.op("aten::to", at, host_us / 100)
            trace.copy(at + 3, 5, 64, kind="Pinned", asked=at + 1, call_lasts=1)
    return trace


def test_a_model_bound_loop_has_no_gain(report):
    found = report(loop_ahead(host_us=3000, kernel_us=9999))
    assert not found.packing.waits_for_device
    assert found.packing.most_saved_seconds < 10e-6
    assert found.verdict.startswith("The GPU is at work for 100% of a step: staging can save")
    assert (
        "The GPU waits for staging for only 0% of a step: 100 host-to-device copies per step"
        in found.verdict
    )
    assert "100% of it behind kernels" in found.verdict
    assert found.verdict.endswith("Packing them into one slab wouldn't help.")


def test_overlapped_copies_can_save_their_host_part(report):
    packing = report(loop_ahead(host_us=3000, kernel_us=50)).packing
    added = 100 * ADDED
    assert packing.saved_seconds == approx(
        3e-3 - added - REFERENCE.seconds(100, 6400, 55e9), rel=0.01
    )
    bound = report(loop_ahead(host_us=3000, kernel_us=2000)).packing
    assert bound.saved_seconds == approx(3.1e-3 - added - 2e-3, rel=0.01)


def test_the_promise_errs_on_the_low_side(report):
    verdict = report(waiting_loop(leaves=40, leaf_us=12, kernel_us=400)).verdict
    assert re.search(r"and save up to [\d.]+ us, perhaps nothing\. --step-ms", verdict), verdict


def test_a_loop_faster_than_one_slab_should_stay(report):
    worst = report(waiting_loop(leaves=8, leaf_us=12, kernel_us=400))
    assert worst.packing.saved_seconds == 0
    assert worst.verdict.endswith(
        "One slab would take about 256 us to stage, longer than the 73.0 us now: leave it as it is."
    )


def test_a_staged_batch_is_recognised_as_one_slab(report):
    trace = TraceMaker()
    for start in trace.steps(4, 1000):
        trace.add("user_annotation", "pinstage.stage", start, 300)
        trace.kernel(start + 400, 500).copy(
            start + 250, 50, 1 << 20, kind="Pinned", asked=start + 240
        )
    worst = report(trace)
    assert worst.packing.most_saved_seconds == 0
    assert worst.verdict.endswith("pinstage stages it as one slab already.")


@pytest.mark.parametrize(
    ("trace", "bus", "speed"),
    [
        (naive_loop(), Bus(pageable=1, pinned=2, call=0), 2e9),
        # The only large page-locked copy.
        (
            TraceMaker()
            .copy(0, 200, 4 << 20, kind="Pinned")
            .copy(200, 1, 1 << 19, kind="Pinned")
            .copy(300, 1, 1 << 22),
            None,
            (4 << 20) / 200e-6,
        ),
        (naive_loop(), None, REFERENCE.bytes_per_second),
    ],
)
def test_the_bus_is_given_or_in_the_trace(report, trace, bus, speed):
    packing = report(trace, bus=bus).packing
    assert packing.bytes_per_second == approx(speed)
    assert packing.packed_seconds == approx(
        250e-6 + packing.leaves * 0.7e-6 + packing.nbytes / speed
    )


@pytest.mark.parametrize("loop", [{"leaves": 1001}, {"leaves": 50, "leaf_bytes": 1 << 20}])
def test_nothing_is_predicted_beyond_the_measured_loops(report, loop):
    found = report(waiting_loop(**loop))
    assert found.packing.saved_seconds == found.packing.most_saved_seconds == 0
    assert (
        "The saving isn't predicted: no loop with more than 1,000 copies or 40.00 MiB per step"
        in found.verdict
    )
    assert "The GPU idles for" in found.verdict


def test_a_waiting_loop_saves_its_staging_time(report):
    found = report(waiting_loop(leaves=700))
    packing = found.packing
    least, most = packing.least_saved_seconds, packing.most_saved_seconds
    assert found.verdict == (
        "A step cannot be shorter than its kernels, 2.00 ms; it takes 16.0 ms here, and about "
        "14.1 ms without the profiler. The GPU idles for 87% of a step (14.0 ms) while the host "
        "stages: 700 host-to-device copies per step (100% below 64.00 KiB, 100% of the bytes from "
        "pageable memory). One slab would take about 808 us to stage, instead of 12.1 ms, and "
        f"save {least * 1e3:.1f} ms to {most * 1e3:.1f} ms of a step. --step-ms, a step's time "
        "without the profiler, narrows this."
    )
    assert packing.waits_for_device
    assert packing.saved_seconds == approx(14e-3 - 700 * ADDED - packing.packed_seconds, rel=1e-3)
    assert 9e-3 < least < packing.saved_seconds < most < 12.2e-3


def test_unpickling_ready_batches_isn_t_waiting_for_workers(report):
    def trace(opens):
        found = TraceMaker()
        for start in found.steps(4, 2000):
            found.wait(start, 700).kernel(start + 1800, 200)
            for leaf in range(50):
                found.op("aten::set_", start + opens + leaf, 0.5)
                at = start + 700 + leaf * 20
                found.op("aten::to", at, 20).copy(at + 10, 2, 64, asked=at + 5)
        return found

    busy, idle = (report(trace(opens)) for opens in (20, 600))
    assert (busy.packing.waits_for_loader, idle.packing.waits_for_loader) == (False, True)
    assert busy.packing.saved_seconds > 0.5e-3
    assert (idle.packing.least_saved_seconds, idle.packing.saved_seconds) == (0, 0)
    assert idle.verdict.startswith(
        "The loop waits 30% of the time for its loader, whose workers or pinning thread set its "
        "pace"
    )


def test_a_trace_without_copies_is_told_so(report):
    verdict = report(TraceMaker().kernel(0, 5)).verdict
    assert (
        verdict == "No host-to-device copy is in this trace: packing can't improve anything in it."
    )


def test_copies_of_unknown_size_are_not_small(report):
    trace = TraceMaker().add("gpu_memcpy", "Memcpy HtoD (Host -> Device)", 0, 22, kind="HtoD")
    assert (
        "1 host-to-device copy per trace (the trace does not record their bytes)"
        in report(trace).verdict
    )


def test_downloads_get_a_verdict_of_their_own(report):
    """Each takes 20 us, and the first of a step also waits for a kernel."""
    trace = TraceMaker()
    for start in trace.steps(4, 5000):
        trace.kernel(start, 1000).op("aten::item", start + 100, 920)
        for at in range(start + 1000, start + 3000, 20):
            trace.op("aten::item", at, 20).copy(at + 5, 2, 4, way="DtoH", asked=at + 2)
    found = report(trace)
    assert found.analysis.middle("download_seconds") == approx(2.9e-3)
    assert found.analysis.middle("exposed_download_seconds") == approx(2e-3)
    assert (
        "Downloads (.item(), .cpu()): 100 device-to-host copies per step, 400 B, block the host "
        "for 2.90 ms, 900 us of it waiting for queued kernels. Stager.fetch copies them together"
        in found.verdict
    )
    assert "Downloads" not in report(naive_loop()).verdict


def test_a_trace_without_gpu_work_is_refused(report):
    with pytest.raises(
        TraceError, match=r"holds no event of a GPU; record the loop on a GPU with activities="
    ):
        report(TraceMaker().step(1, 0, 1000).wait(0, 250).op("aten::copy_", 300, 100))


# -- what is printed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trace",
    [
        TraceMaker().kernel(0, 5),
        TraceMaker().copy(0, 5, 64),
        TraceMaker().copy(0, 0, 0),
        TraceMaker().call("cudaStreamSynchronize", 0, 0),
        TraceMaker().step(1, 0, 0).kernel(0, 0),
        TraceMaker().step(1, 0, 10).wait(0, 10).copy(50, 10, 1, way="DtoD"),
    ],
)
def test_sparse_traces_are_shown_too(report, trace):
    found = report(trace)
    assert as_text(found.sections())
    assert json.dumps(found.to_dict())


def test_the_text_is_one_screen_with_the_assumptions(report):
    text = as_text(report(naive_loop(steps=20)).sections())
    assert text.startswith("A step cannot be shorter than its kernels")
    for part in ("copies; hidden", "a step, medians", "The prediction assumes:", REFERENCE.source):
        assert part in text
    assert "NVIDIA H200 (device 0)" in text
    assert text.count("\n- ") == 4
    assert text.count("\n") < 24


def test_a_terminal_of_eighty_columns_cuts_no_number(report):
    console = pytest.importorskip("rich.console").Console(width=80)
    found = report(naive_loop(steps=20, leaves=700)).sections()
    with console.capture() as capture:
        console.print(as_rich(found))
    words = set(capture.get().split())
    for table in found:
        if isinstance(table, TextTable):
            for row in table.rows:
                for column, cell in zip(table.columns, row, strict=True):
                    assert column[0] != ">" or set(cell.split()) <= words, (table.title, column)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 7, 100, 1 << 20])
def test_events_don_t_depend_on_window_boundaries(tmp_path, monkeypatch, window):
    trace = naive_loop(steps=2, leaves=3, schemaVersion=1234567)
    trace.add("cpu_op", 'a "quoted" ] } { [ \u00e9\u20ac\U0001f600 \\ name', 1, 2)
    written = json.loads(trace.text())
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(written, ensure_ascii=False).encode()))
    monkeypatch.setattr(_events, "_WINDOW", window)
    file = _events.TraceFile(path)
    assert list(file) == written["traceEvents"]
    assert file.header["schemaVersion"] == 1234567
    assert file.header["traceName"] == "t"


def test_the_older_format_of_events_alone_is_read(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(naive_loop().events))
    assert trace_report(path).analysis.sum_of("copies") == 300


def test_only_complete_events_count(analysis):
    trace = TraceMaker().copy(0, 5, 64)
    (event,) = trace.events
    trace.events += [event | {"ph": phase} for phase in "iBEbf"]
    assert analysis(trace).sum_of("copies") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't a profiler trace: empty file"),
        (b"[project]\nname = 3\n", "isn't a profiler trace"),
        (b'{"a": 1, "b": 2}', r"JSON without traceEvents \(its keys: a, b\)"),
        (b'{"traceEvents": []}', "holds no event of a GPU"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}',
            r"event 1 \(kernel\) has no usable 'ts'",
        ),
        (b'{"traceEvents": [{"ph": "M"}, {"ph": "X", "na', "broken or cut off after 1 events"),
        (b'{"traceEvents": [{"ph": "M"}', "broken or cut off"),
        (b'{"traceEvents": [{"ph": "M"}]', "broken or cut off"),
        (b"\x1f\x8b\x08\x00garbage", "isn't a profiler trace"),
        (
            gzip.compress(b'{"traceEvents": [' + b'{"ph": "M"},' * 5000)[:-40],
            "broken or cut off|isn't a profiler trace",
        ),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "isn't a profiler trace: invalid JSON"),
        (b"[" * 100_000, "isn't a profiler trace: maximum recursion depth exceeded"),
        (
            b'{"traceEvents": [{"ph": "M"}, ' + b'{"a":' * 100_000,
            "broken or cut off after 1 events: maximum recursion",
        ),
        (b'{"schemaVersion": ' + b"9" * 5000 + b"}", "isn't a profiler trace: Exceeds the limit"),
        (b'{"\x1b]0;title\x07": 1}', "without traceEvents .its keys: \ufffd]0;title\ufffd"),
    ],
)
def test_files_that_aren_t_traces_are_refused(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        trace_report(path)
    assert str(caught.value).count("t.json") == 1


NUMBERS = "ts", "dur", "device", "bytes", "correlation"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *product(NUMBERS, ("x", [], *map(float, ("nan", "inf", "-inf")), 2**70, 10**400)),
        *product(NUMBERS[1:], (-2,)),
        ("device", 2**40),
        *product(("name", "args"), (5, ["a"])),
    ],
)
def test_values_that_cannot_be_right_are_an_error(tmp_path, where, value):
    fine = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1, "dur": 1}
    event = {**fine, "args": {where: value}, where: value}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [fine, event]}))
    with pytest.raises(
        TraceError, match=r"t.json isn't a trace .*: event 2 \(gpu_memcpy\) has no usable .{,100}$"
    ):
        trace_report(path)


def test_an_impossible_step_number_is_an_error(report):
    with pytest.raises(TraceError, match="has no usable"):
        report(naive_loop().step("9" * 5000, 0, 1))


@pytest.mark.parametrize("header", [None, {"name": "a"}, [], [{"name": 5}]])
def test_a_header_of_another_kind_is_left_out(report, header):
    found = report(TraceMaker(deviceProperties=header).kernel(0, 1))
    assert found.analysis.device_name is None


def test_names_reach_no_terminal_as_control_sequences(report):
    names = "\x1b]52;c;ZXZpbA==\x07", "\ud800", "\x9b2J", "\u202e"
    trace = TraceMaker(deviceProperties=[{"name": "".join(names)}])
    for name in names:
        trace.call(f"cudaMemcpy{name}", 0, 1).copy(0, 1, 8, kind=name)
    found = report(trace, name="t\x1b[2J.json")
    for text in (as_text(found.sections()), json.dumps(found.to_dict(), ensure_ascii=False)):
        assert text.replace("\n", "").isprintable()  # so it can be encoded, too
        assert "\ufffd]52;c;zxzpba==\ufffd" in text.lower()


def test_a_broken_event_isn_t_searched_endlessly(tmp_path, monkeypatch):
    monkeypatch.setattr(_events, "_WINDOW", 1000)
    monkeypatch.setattr(_events, "_LONGEST_VALUE", 5000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "M"}, {"ph": oops}' + ', {"ph": "M"}' * 100_000 + "]}")
    decoded, decode = [], _events._decode
    monkeypatch.setattr(
        _events, "_decode", lambda text, at: decoded.append(len(text)) or decode(text, at)
    )
    with pytest.raises(TraceError, match="broken"):
        list(_events.TraceFile(path))
    assert max(decoded) < 10_000


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read .*nope.json: No such file"):
        trace_report(tmp_path / "nope.json")
    with pytest.raises(TraceError, match=r"cannot read .*: Is a directory"):
        trace_report(tmp_path)
