"""Inspection that needs a GPU: the measured bus, the doctor's measurement, and a freshly recorded
trace.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

import pinstage as ps
from pinstage import _steps
from pinstage.inspect._bus import KIB, MIB, PAGEABLE, PINNED, SIZES, measure
from pinstage.inspect._doctor import diagnose
from pinstage.inspect._trace import trace_report

pytestmark = pytest.mark.gpu


def test_auditing_device_tensors_reports_what_pinning_does(cuda_device):
    found = ps.audit(
        {"x": [torch.zeros(1024) for _ in range(100)], "on": torch.zeros(3, device=cuda_device)}
    )
    assert found.each.copies == 100
    assert "cannot pin a tensor on cuda:0" in found.pinning.error


def test_an_audit_sees_pinned_memory_and_pins_none(cuda_device):
    batch = {"pinned": torch.zeros(10).pin_memory(), "pageable": torch.zeros(10)}
    leaves = {leaf.path: leaf for leaf in ps.audit(batch).leaves}
    assert leaves["['pinned']"].pinned
    assert leaves["['pageable']"].loader_pins
    assert not leaves["['pageable']"].pinned
    assert not batch["pageable"].is_pinned()


def test_the_audit_of_pinning_agrees_with_torch(cuda_device):
    class Unknown:
        def __init__(self):
            self.x = torch.zeros(2)

    batch = {"a": [torch.zeros(1), (torch.zeros(2),)], "u": Unknown()}
    really = torch.utils.data._utils.pin_memory.pin_memory(batch)
    leaves = {leaf.path: leaf for leaf in ps.audit(batch).leaves}
    assert leaves["['a'][0]"].loader_pins == really["a"][0].is_pinned()
    assert leaves["['a'][1][0]"].loader_pins == really["a"][1][0].is_pinned()
    assert leaves["['u'].x"].loader_pins == really["u"].x.is_pinned() is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [lambda x: x / 255, lambda x: x * (1 / 255)])
def test_bytes_sent_for_255ths_become_the_same_bits(cuda_device, dtype, scaled):
    numbers = torch.arange(256, dtype=torch.uint8)
    leaf = scaled(numbers.to(dtype))
    (found,) = ps.audit([leaf]).narrow
    assert found.narrow_dtype == "uint8"
    restored = eval(found.code, {"x": numbers.to(cuda_device), "torch": torch})
    assert restored.device == cuda_device
    assert restored.dtype == dtype
    assert torch.equal(restored.cpu(), leaf)


def test_a_gpu_divides_by_a_number_less_exactly(cuda_device):
    """The reason for the audit's line."""
    numbers = torch.arange(256, dtype=torch.uint8)
    on_gpu = numbers.to(cuda_device).float() / 255
    assert not torch.equal(on_gpu.cpu(), numbers.float() / 255)


@pytest.mark.parametrize(
    "leaf",
    [torch.arange(-128, 128), torch.arange(-255.0, 1.0).double(), torch.arange(256).bfloat16()],
)
def test_whole_numbers_sent_narrower_become_the_same_bits(cuda_device, leaf):
    (found,) = ps.audit([leaf]).narrow
    sent = leaf.to(getattr(torch, found.narrow_dtype)).to(cuda_device)
    assert torch.equal(eval(found.code, {"x": sent, "torch": torch}).cpu(), leaf)


def test_the_doctor_measures(cuda_device):
    found = diagnose()
    assert not [check for check in found.checks if check.status == "problem"]
    assert len(found.points) == 6 * len(SIZES)
    fastest = max(found.points, key=lambda point: point.bytes_per_second)
    assert fastest.kind != PAGEABLE


def test_without_measuring_the_doctor_copies_nothing(cuda_device):
    found = diagnose(measuring=False)
    assert found.points == ()
    assert any(check.found == "not measured: as requested" for check in found.checks)


def test_small_copies_are_far_from_the_bus(cuda_device):
    small, large = measure(cuda_device, sizes=(4 * KIB, 64 * MIB), kinds=(PINNED,))[:2]
    assert small.bytes_per_second < large.bytes_per_second / 5


def test_a_recorded_loop_is_read_as_it_was(cuda_device, tmp_path):
    leaves, steps = 40, 5
    batch = [torch.zeros(1024) for _ in range(leaves)]
    pinned = torch.zeros(4 * MIB, dtype=torch.uint8).pin_memory()
    weight = torch.zeros(512, 512, device=cuda_device)
    path = tmp_path / "trace.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(steps + 2):
            for leaf in batch:
                leaf.to(cuda_device)
            pinned.to(cuda_device, non_blocking=True)
            (weight @ weight).sum().item()
            profiler.step()
    analysis = trace_report(path).analysis
    found = {(group["direction"], group["kind"]): group for group in analysis.groups}
    assert analysis.annotated
    assert len(analysis.steps) == steps
    assert found["HtoD", "pageable"]["copies"] == leaves * steps
    assert found["HtoD", "pageable"]["nbytes"] == leaves * steps * 4096
    assert found["HtoD", "pinned"]["copies"] == steps
    assert found["HtoD", "pinned"]["nbytes"] == steps * 4 * MIB
    assert analysis.sum_of("copies", "DtoH") >= steps
    for step in analysis.steps:
        assert step["copies"] == leaves + 1
        assert 0 < step["kernel_seconds"] < step["seconds"]
        assert step["stall_seconds"] <= step["staging_seconds"] <= step["seconds"]
    assert analysis.device_name == torch.cuda.get_device_name(cuda_device)


def test_steps_are_nvtx_ranges_under_emit_nvtx(cuda_device):
    batch = {"x": torch.ones(8)}
    with ps.Stager(cuda_device, max_bytes="8MiB") as stager, torch.autograd.profiler.emit_nvtx():
        # in this mode of torch's profiler each record_function pushes and pops an NVTX range
        assert torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
        assert _steps.step("pack")._range is not None
        assert torch.equal(stager.to_device(batch)["x"].cpu(), batch["x"])
    assert not hasattr(_steps.step("pack"), "_range")
