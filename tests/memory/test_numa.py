"""The node for pages, read from a fake sysfs, and the request for that node before pages are
touched.
"""

import ctypes
import logging
import mmap
import os
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from pinstage import _host
from pinstage._memory import _cuda, _numa
from pinstage._memory import _pages as pages
from pinstage.memory import RegisteredMemory, SharedMemory

GPU = "0000:1b:00.0"


@pytest.fixture
def host(tree):
    """Make a sysfs: nodes with their CPUs, and the node that the firmware reports for the GPU."""

    def make(nodes, gpu=None):
        folder = "sys/devices/system/node"
        files = {f"{folder}/node{node}/cpulist": f"{cpus}\n" for node, cpus in nodes.items()}
        files[f"{folder}/online"] = ",".join(map(str, nodes)) + "\n"
        return tree(files | {f"sys/bus/pci/devices/{GPU}/numa_node": f"{gpu}\n"})

    return make


TWO = {0: "0-3", 1: "4-7,16-19"}
OTHERS = {0: "0-7", 1: "8-15"}
GRACE = {0: "0-7", **dict.fromkeys(range(1, 9), "")}
"""One node with CPUs, and eight that are the GPU's memory."""
KEPT = (None, frozenset(), "this process has a memory policy (numactl), which is kept")
UNKNOWN = "numa_node='auto': the system doesn't report the device's node: "
NO_CPUS = "this process may use none of the CPUs of node 1, the device's"


def placed(host, nodes, gpu, asked="auto"):
    return _numa.placement(asked, lambda: gpu, host(nodes))


@pytest.mark.parametrize(
    ("number", "nodes", "gpu", "asked", "expected"),
    [
        (0, TWO, 1, "auto", (1, {4, 5, 6, 7}, "node 1, the device's")),
        (0, {0: "0,2", 1: "1,3"}, None, 0, (0, {0, 2}, "node 0, as asked")),
        (None, TWO, 1, "auto", (None, {4, 5, 6, 7}, "node 1, the device's")),
        (2, TWO, 1, "auto", KEPT),
        (2, TWO, 1, 1, KEPT),
        (0, TWO, None, "auto", (None, frozenset(), f"{UNKNOWN}None")),
        (0, TWO, 2, "auto", (None, frozenset(), f"{UNKNOWN}2")),
        (0, OTHERS, 1, "auto", (None, frozenset(), NO_CPUS)),
        (0, OTHERS, 1, 1, (1, set(), "node 1, as asked (this process may use none of its CPUs)")),
    ],
    ids=[
        "the device's",
        "as asked",
        "the call is forbidden",
        "a policy of the process",
        "a policy of the process, as asked",
        "not reported",
        "no such node",
        "no CPUs",
        "no CPUs, as asked",
    ],
)
def test_pages_are_near_the_device_if_possible(
    host, monkeypatch, number, nodes, gpu, asked, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(pages, "memory_policy", lambda: number)
    assert placed(host, nodes, gpu, asked) == expected


@pytest.mark.parametrize("asked", ["auto", 0])
@pytest.mark.parametrize(
    "nodes",
    [{0: "0-7"}, {}, GRACE],
    ids=["one node", "no nodes known", "one node with CPUs"],
)
def test_a_host_with_one_node_asks_nothing(host, monkeypatch, asked, nodes):
    monkeypatch.setattr(pages, "memory_policy", lambda: pytest.fail("asked"))
    root = host(nodes)
    node, cpus, reason = _numa.placement(asked, lambda: pytest.fail("asked"), root)
    assert (node, cpus) == (None, frozenset())
    assert reason == f"numa_node={asked!r}: this host has one NUMA node, nothing to do"


def test_sysfs_knows_what_the_driver_doesn_t(host, monkeypatch):
    numbers = {"HOST_NUMA_ID": -1}
    monkeypatch.setattr(_cuda, "attribute", lambda index, name: numbers[name])
    monkeypatch.setattr(_cuda, "pci_address", lambda index: GPU.upper())
    root = host({0: "0", 1: "1"}, gpu=1)
    assert _numa.device_node(3, root) == 1
    numbers["HOST_NUMA_ID"] = 0
    assert _numa.device_node(3, root) == 0


@pytest.mark.parametrize("missing", [7, 1], ids=["not there", "without CPUs"])
def test_a_missing_node_is_an_error_naming_others(host, missing):
    with pytest.raises(ValueError, match=rf"no node {missing} with CPUs .* has \[0, 2\]"):
        placed(host, {0: "0", 1: "", 2: "1"}, None, asked=missing)


@pytest.mark.parametrize("wrong", [-1, True, "0", 1.0, "automatic"])
def test_what_is_no_node_is_an_error(kind, cuda, wrong):
    with pytest.raises(ValueError, match="numa_node must be a node's number, 'auto' or None"):
        kind(0, numa_node=wrong)


def test_the_system_is_asked_for_local_pages(monkeypatch):
    calls = []

    def syscall(number, address, nbytes, mode, mask, bits, flags):
        calls.append((address, nbytes, mode, mask, bits, flags))
        return 0

    monkeypatch.setattr(pages, "libc", lambda: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(pages.platform, "machine", lambda: "x86_64")
    assert pages.prefer(4096, 8192, 65)
    ((*start, mask, bits, flags),) = calls
    assert start == [4096, 8192, 1]  # MPOL_PREFERRED
    assert struct.unpack("16L", mask) == (0, 2, *[0] * 14)
    assert (bits, flags) == (1024, 0)
    monkeypatch.setattr(pages, "libc", lambda: SimpleNamespace(syscall=lambda *_: -1))
    assert not pages.prefer(4096, 8192, 0)
    monkeypatch.setattr(pages.platform, "machine", lambda: "riscv64")
    assert not pages.prefer(4096, 8192, 0)


def test_this_kernel_takes_the_call_or_forbids_it():
    address = pages.map_pages(mmap.PAGESIZE)
    try:
        node = min(_host.numa_nodes(), default=0)
        if not pages.prefer(address, mmap.PAGESIZE, node):
            # EPERM, ENOSYS: a sandbox.
            assert ctypes.get_errno() in (1, 38), os.strerror(ctypes.get_errno())
        pages.populate(address, mmap.PAGESIZE)
        assert ctypes.string_at(address, 4) == bytes(4)
    finally:
        pages.unmap(address, mmap.PAGESIZE)


def test_touching_threads_move_but_the_caller_stays(monkeypatch):
    mine = os.sched_getaffinity(0)
    cpu = min(mine)
    touched = []
    piece = pages._populate_piece

    def watch(address, nbytes, is_fresh):
        touched.append((threading.get_ident(), os.sched_getaffinity(0)))
        piece(address, nbytes, is_fresh)

    monkeypatch.setattr(pages, "_populate_piece", watch)
    nbytes = 3 * pages.POPULATE_PIECE_BYTES
    address = pages.map_pages(nbytes)
    try:
        pages.populate(address, nbytes, threads=1, cpus=frozenset({cpu}))
    finally:
        pages.unmap(address, nbytes)
    assert len(touched) == 3
    assert all(cpus == {cpu} and thread != threading.get_ident() for thread, cpus in touched)
    assert os.sched_getaffinity(0) == mine


@pytest.fixture
def registered(cuda, monkeypatch):
    """Return the order of operations on registered memory."""
    log = []
    cuda.before["cudaHostRegister"] = lambda: log.append("register")
    monkeypatch.setattr(
        pages, "prefer", lambda _address, _nbytes, node: log.append(f"prefer {node}") or True
    )
    populate = pages.populate

    def watched(address, nbytes, *, threads=None, cpus):
        log.append(f"touch on {sorted(cpus)}")
        populate(address, nbytes, threads=threads, cpus=cpus)

    monkeypatch.setattr(pages, "populate", watched)
    return log


@pytest.fixture(params=[RegisteredMemory, SharedMemory])
def kind(request):
    return request.param


def test_pages_are_placed_then_touched_then_registered(registered, monkeypatch, caplog, kind):
    cpu = min(os.sched_getaffinity(0))
    asked = []

    def placement(number, find_node):
        asked.append((number, find_node()))
        return _numa.Placement(1, frozenset({cpu}), "node 1, the device's")

    monkeypatch.setattr(_numa, "device_node", lambda device: device)
    monkeypatch.setattr(_numa, "placement", placement)
    memory = kind(torch.device("cuda", 3))
    with caplog.at_level(logging.INFO, "pinstage"):
        for _ in range(2):
            memory.deallocate(memory.allocate(5000))
    assert registered == ["prefer 1", f"touch on [{cpu}]", "register"] * 2
    assert asked == [("auto", 3)], "found out once for each device"
    assert memory.numa == "node 1, the device's"
    assert [record.message for record in caplog.records] == [
        f"{kind.__name__} for cuda:3: node 1, the device's"
    ]


def test_without_a_node_the_system_isn_t_asked(registered, kind):
    memory = kind(3, numa_node=None)
    memory.deallocate(memory.allocate(5000))
    assert registered == ["touch on []", "register"]
    assert memory.numa == "no NUMA node was asked for"


def test_a_wrong_node_maps_nothing(registered, monkeypatch, host, kind):
    root = host({0: "0", 1: "1"})
    placement = _numa.placement
    monkeypatch.setattr(_numa, "placement", lambda asked, find: placement(asked, find, root))
    with pytest.raises(ValueError, match="no node 9"):
        kind(3, numa_node=9).allocate(5000)
    assert registered == []
