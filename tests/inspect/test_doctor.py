"""The doctor's checks: each branch, with made-up facts and with trees of files that stand for
machines.
"""

import json
import struct
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from doubles import wait_until

from pinstage.inspect import _checks
from pinstage.inspect._bus import (
    MIB,
    PAGEABLE,
    PINNED,
    REGISTERED,
    TO_DEVICE,
    TO_HOST,
    Point,
    measure,
)
from pinstage.inspect._checks import (
    Check,
    cpus,
    cuda,
    host_page_tables,
    huge_pages,
    link,
    loader_slabs,
    memory,
    numa,
    page_locking,
    shared_memory,
    wsl,
)
from pinstage.inspect._doctor import Diagnosis, bandwidth, diagnose, save_plot, try_page
from pinstage.inspect._gpus import Driver, Gpu, Link, find_driver, find_gpus, find_links
from pinstage.inspect._report import as_text

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", Link(5, 16, 16), 0, frozenset(range(8)))


# -- the checks ------------------------------------------------------------------------------------

DRIVER = Driver("580.159", "13.0")
OLD = Driver("550.54", "12.4")
versions = partial(_checks.versions, "3.12.3")


@pytest.mark.parametrize(
    ("check", "status", "part"),
    [
        (memory(GIB, "25% of 4.00 GiB"), "ok", "1.00 GiB: 25% of 4.00 GiB"),
        (memory(GIB >> 2, "25% of 1.00 GiB"), "warning", "256.00 MiB: 25% of 1.00 GiB"),
        (shared_memory(None), "warning", "not there"),
        (shared_memory(64 * MIB), "warning", "64.00 MiB"),
        (shared_memory(8 * GIB), "ok", "8.00 GiB"),
        (huge_pages("madvise", "never"), "ok", "madvise; of shared memory (shmem_enabled): never"),
        (huge_pages("always", "advise"), "ok", "always"),
        (huge_pages("never", "never"), "warning", "never"),
        (huge_pages("", ""), "info", "does not report"),
        (cpus(16, None, 16), "ok", "16 of 16"),
        (cpus(8, None, 16), "ok", "8 of 16 (8 by affinity)"),
        (cpus(2, None, 16), "warning", "2 of 16"),
        (
            cpus(16, 4.0, 16),
            "warning",
            "4 of 16 (4 by the control group's quota); torch starts threads for 16",
        ),
        (cpus(16, 16.0, 16), "ok", "16 of 16"),
        (wsl(False), "ok", "no"),
        (wsl(True), "warning", "about 1 GiB"),
        (cuda("13.0", True, [H200], DRIVER), "ok", "NVIDIA H200 (cuda:0)"),
        (cuda(None, False, [], Driver(None, None)), "info", "no NVIDIA driver"),
        (cuda(None, False, [], DRIVER), "problem", "built without CUDA"),
        (cuda("13.0", False, [], OLD), "problem", "torch for CUDA 13.0 can't use it"),
        (versions(DRIVER, "13.0", "13.0.1"), "ok", "cuda-python 13.0.1"),
        (versions(DRIVER, "12.8", "12.9.1"), "ok", "torch CUDA 12.8"),
        (
            versions(OLD, "12.4", "13.0.1"),
            "problem",
            "cuda-python is newer than the driver",
        ),
        (versions(OLD, "13.0", "12.9"), "problem", "torch is newer than the driver"),
        (versions(DRIVER, "13.0", None), "problem", "cuda-python none"),
        (versions(Driver(None, None), None, "13.0"), "info", "driver none"),
        (versions(Driver("580", None), "13.0", "13.0"), "ok", "CUDA ?"),
        (page_locking(True, None, "registered", ""), "ok", "works"),
        (
            page_locking(True, None, "allocated", "refused (801)"),
            "warning",
            "refused (801). A HostRegion is alloc",
        ),
        (
            page_locking(True, None, "pageable", "refused (801)"),
            "problem",
            "could not be registered",
        ),
        (
            page_locking(True, "cuda-python cannot use the driver", "pageable", ""),
            "problem",
            "cannot use the",
        ),
        (page_locking(False, "no CUDA device", "pageable", ""), "info", "not without a GPU"),
        (link(H200), "ok", "generation 5 x16: 63.0 GB/s"),
        (link(Gpu(0, "g")), "info", "virtual machine"),
        (
            link(Gpu(0, "g", Link(5, 8, 16))),
            "warning",
            "generation 5 x8: 31.5 GB/s; x16 is possible",
        ),
        (host_page_tables(H200), "ok", "page tables of its own"),
        (host_page_tables(Gpu(0, "NVIDIA GH200 480GB")), "warning", "Grace"),
        (host_page_tables(Gpu(0, "NVIDIA GB200")), "warning", "Grace"),
        (numa(H200, set(range(16)), 1), "ok", "one node"),
        (numa(H200, set(range(4)), 2), "ok", "at node 0; 4 of this process's 4 CPUs"),
        (numa(H200, set(range(16)), 2), "info", "8 of this process's 16 CPUs"),
        (numa(H200, {20, 21}, 2), "warning", "0 of this process's 2 CPUs are there"),
        (numa(Gpu(0, "g"), {0}, 2), "info", "doesn't report"),
        (numa(H200, set(range(4)), 2, has_policy=True), "ok", "(numactl)"),
        (loader_slabs(True, True), "ok", "page-locked"),
        (loader_slabs(True, False), "warning", "can't be page-locked"),
        (loader_slabs(False, False), "info", "isn't page-locked"),
    ],
)
def test_a_check_judges_what_it_is_given(check, status, part):
    assert check.status == status
    assert part in check.found
    assert status == "info" or bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("driver", "built_for", "bindings", "package"),
    [(OLD, "12.4", "13.0.1", ">=12.9,<13"), (Driver("580", None), "13.0", None, ">=13,<14")],
)
def test_the_cuda_python_remedy_is_pasteable(driver, built_for, bindings, package):
    remedy = versions(driver, built_for, bindings).remedy
    assert f'pip install "cuda-python{package}"' in remedy


# -- GPUs ------------------------------------------------------------------------------------------


SMI = """\
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: 13.0     |
"""


@pytest.mark.parametrize("module", ["Kernel Module", "Open Kernel Module for x86_64"])
def test_the_driver_comes_from_nvidia_smi_or_kernel(tree, module):
    text = f"NVRM version: NVIDIA UNIX x86_64 {module}  570.86.15  Thu Jan\n"
    root = tree({"proc/driver/nvidia/version": text})
    assert find_driver(root, lambda arguments: SMI) == Driver("580.159.04", "13.0")
    assert find_driver(root, lambda arguments: "") == Driver("570.86.15", None)
    assert find_driver(root / "nowhere", lambda arguments: "") == Driver(None, None)


def test_links_are_those_that_nvidia_smi_knows():
    refused = 'Field "pcie.link.gen.max" is not a valid field to query.\n'
    assert find_links(lambda arguments: refused) == {}
    known = "GPU-1, 5, 8, 16\nGPU-2, [N/A], 16, 16\nGPU-3, 4, 16, 16\n"
    assert find_links(lambda arguments: known) == {"1": Link(5, 8, 16), "3": Link(4, 16, 16)}


def test_a_gpu_is_described_from_all_sources(tree, monkeypatch):
    device = "sys/bus/pci/devices/0000:3b:00.0"
    root = tree({f"{device}/numa_node": "1\n", f"{device}/local_cpulist": "8-15\n"})
    found = SimpleNamespace(
        name="NVIDIA H100", uuid="1", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    gpu = Gpu(0, "NVIDIA H100", Link(5, 8, 16), 1, frozenset(range(8, 16)))
    assert find_gpus(root, lambda arguments: "GPU-1, 5, 8, 16\n") == [gpu]
    assert find_gpus(root / "x", lambda arguments: "") == [Gpu(0, "NVIDIA H100")]


# -- transfers -------------------------------------------------------------------------------------


def points(pinned=55e9):
    rates = {PAGEABLE: 9e9, PINNED: pinned, REGISTERED: pinned}
    return [
        Point(way, kind, nbytes, 8e-6 + nbytes / rates[kind])
        for kind, way, nbytes in product(rates, (TO_DEVICE, TO_HOST), (4096, MIB, 256 * MIB))
    ]


@pytest.mark.parametrize(
    ("speeds", "gpu", "status", "part"),
    [
        ({}, H200, "ok", "pageable 9.0 GB/s, pinned 54.9 GB/s, registered 54.9 GB/s, 256.00 MiB"),
        ({"pinned": 20e9}, H200, "warning", "32% of the link's 63.0 GB/s"),
        ({"pinned": 9.5e9}, Gpu(0, "g"), "warning", "hardly faster than pageable"),
        ({"pinned": 9.5e9}, Gpu(0, "NVIDIA GH200", H200.link), "ok", "pinned 9.5 GB/s"),
    ],
)
def test_the_largest_copies_of_each_direction_are_judged(speeds, gpu, status, part):
    checks = _checks.bandwidth(points(**speeds), gpu)
    assert [check.name for check in checks] == [TO_DEVICE, TO_HOST]
    for check in checks:
        assert check.status == status
        assert part in check.found


def test_the_bandwidth_is_a_table_of_kinds():
    table = bandwidth(points())
    assert list(table.columns) == ["", ">size", ">pageable", ">pinned", ">registered"]
    assert table.rows[2] == [TO_DEVICE, "256.00 MiB", "9.0", "54.9", "54.9"]


def test_the_measurement_measures_every_combination():
    sizes = (1024, 4096)
    found = measure("cpu", sizes=sizes)
    assert [(point.kind, point.direction, point.nbytes) for point in found] == [
        *product((PAGEABLE, PINNED, REGISTERED), (TO_DEVICE, TO_HOST), sizes)
    ]
    assert all(point.seconds > 0 for point in found)


def test_the_plot_is_a_png_of_both_directions(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bandwidth.png"
    save_plot(points(), path, title="NVIDIA H200", link_rate=63e9)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300


# -- the whole report ------------------------------------------------------------------------------


def test_the_report_has_each_line_and_each_remedy():
    checks = Check("a", "ok", "fine"), Check("b", "problem", "broken", "mend it")
    found = Diagnosis(checks, gpu=H200, points=tuple(points()))
    text = as_text(found.sections())
    for part in (
        "ok       a     fine",
        "PROBLEM  b     broken",
        "b: mend it",
        "1 problem and 0 warnings in 2 checks",
        "host to device  256.00 MiB",
    ):
        assert part in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["problem"] is True
    assert len(data["bandwidth"]) == len(points())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("most", "kind"), [(None, "registered"), (0, "allocated")])
def test_a_page_is_tried(cuda, most, kind):
    cuda.most_registered = most
    found, reason = try_page(0)
    assert found == kind
    assert bool(reason) is (kind != "registered")
    wait_until(lambda: not (cuda.registered or cuda.allocated or cuda.context_stack))


def test_without_a_gpu_the_host_is_reported(tmp_path):
    found = diagnose(root=tmp_path, smi=lambda arguments: "")
    by_name = {check.name: check for check in found.checks}
    assert found.gpu is None
    assert by_name["/dev/shm"].status == "warning"
    assert not found.has_problem  # warnings don't count
    assert by_name["CUDA"].status == "info"
    assert by_name["bandwidth"].found == "not measured: no GPU"
    assert {"CPUs", 'max_bytes="auto"', "huge pages", "WSL"} <= set(by_name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_driver_torch_cannot_use_is_a_problem(tmp_path):
    found = diagnose(root=tmp_path, smi=lambda arguments: "" if arguments else SMI)
    assert found.has_problem
    assert found.checks[0].name == "CUDA"
    assert found.checks[0].remedy
