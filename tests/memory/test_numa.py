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
from pinstage._memory import RegisteredMemory, _cuda, _numa
from pinstage._memory import _pages as pages

GPU = "0000:1b:00.0"


@pytest.fixture
def host(tmp_path):
    """Make a sysfs: nodes with their CPUs, and the node that the firmware reports for the GPU."""

    def make(nodes, gpu=None):
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True)
        (folder / "online").write_text(",".join(map(str, nodes)) + "\n")
        for node, cpus in nodes.items():
            (folder / f"node{node}").mkdir()
            (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
        if gpu is not None:
            device = tmp_path / "sys/bus/pci/devices" / GPU
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{gpu}\n")
        return tmp_path

    return make


@pytest.fixture
def affinity(monkeypatch):
    """The CPUs that the process seems to have: 0 to 7."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_auto_is_the_node_of_the_device(host, affinity):
    root = host({0: "0-3", 1: "4-7,16-19"}, gpu=1)
    assert _numa.placement("auto", GPU.upper(), root) == (
        1,
        {4, 5, 6, 7},
        f"node 1, that of {GPU.upper()}",
    )


def test_a_node_that_is_named_is_taken(host, affinity):
    assert _numa.placement(0, "", host({0: "0,2", 1: "1,3"})) == (0, {0, 2}, "node 0, as asked")


@pytest.mark.parametrize("asked", ["auto", 0, 5])
@pytest.mark.parametrize("nodes", [{0: "0-7"}, {}], ids=["one node", "no nodes known"])
def test_a_host_with_one_node_does_nothing(host, asked, nodes):
    node, cpus, reason = _numa.placement(asked, GPU, host(nodes, gpu=0))
    assert (node, cpus) == (None, frozenset())
    assert reason == f"numa_node={asked!r}: this host has one NUMA node, nothing to do"


@pytest.mark.parametrize("gpu", [None, -1, "nonsense"])
def test_an_unknown_node_does_nothing(host, gpu):
    node, _, reason = _numa.placement("auto", GPU, host({0: "0", 1: "1"}, gpu=gpu))
    assert node is None
    assert reason == f"numa_node='auto': the system doesn't report the node of {GPU}"


def test_a_missing_node_is_an_error_naming_others(host):
    with pytest.raises(ValueError, match=r"no node 7 on this host, which has \[0, 2\]"):
        _numa.placement(7, "", host({0: "0", 2: "1"}))


def test_without_the_node_s_cpus_pages_still_come(host, affinity):
    node, cpus, reason = _numa.placement(1, "", host({0: "0-7", 1: "8-15"}))
    assert (node, cpus) == (1, frozenset())
    assert reason == "node 1, as asked (this process may use none of its CPUs)"


@pytest.mark.parametrize("wrong", [-1, True, "0", 1.0, "automatic"])
def test_what_is_no_node_is_an_error(wrong):
    with pytest.raises(ValueError, match="numa_node must be a node's number, 'auto' or None"):
        _numa.check(wrong)


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
def registered(monkeypatch):
    """Let registered memory be made without CUDA; return the order of operations on it."""
    log = []
    monkeypatch.setattr(_cuda, "require", lambda _: None)
    monkeypatch.setattr(_cuda, "device_index", lambda _: 3)
    monkeypatch.setattr(_cuda, "pci_address", lambda index: f"0000:0{index}:00.0")
    monkeypatch.setattr(_cuda, "register", lambda *_: log.append("register"))
    monkeypatch.setattr(_cuda, "unregister", lambda *_: None)
    monkeypatch.setattr(
        pages, "prefer", lambda _address, _nbytes, node: log.append(f"prefer {node}") or True
    )
    populate = pages.populate

    def watched(address, nbytes, *, threads, cpus):
        log.append(f"touch on {sorted(cpus)}")
        populate(address, nbytes, threads=threads, cpus=cpus)

    monkeypatch.setattr(pages, "populate", watched)
    return log


def test_pages_are_placed_then_touched_then_registered(registered, monkeypatch, caplog):
    cpu = min(os.sched_getaffinity(0))
    asked = []

    def placement(*args):
        asked.append(args)
        return _numa.Placement(1, frozenset({cpu}), "node 1, that of the GPU")

    monkeypatch.setattr(_numa, "placement", placement)
    memory = RegisteredMemory(torch.device("cuda", 3), numa_node="auto")
    with caplog.at_level(logging.INFO, "pinstage"):
        for _ in range(2):
            memory.deallocate(memory.allocate(5000))
    assert registered == ["prefer 1", f"touch on [{cpu}]", "register"] * 2
    assert asked == [("auto", "0000:03:00.0")], "found out once for each device"
    assert memory.numa == "node 1, that of the GPU"
    assert [record.message for record in caplog.records] == [
        "RegisteredMemory for cuda:3: node 1, that of the GPU"
    ]


def test_without_a_node_the_system_isn_t_asked(registered):
    memory = RegisteredMemory()
    memory.deallocate(memory.allocate(5000))
    assert registered == ["touch on []", "register"]
    assert memory.numa == "no NUMA node was asked for"


def test_a_wrong_node_maps_nothing(registered, monkeypatch, host):
    root = host({0: "0", 1: "1"})
    placement = _numa.placement
    monkeypatch.setattr(_numa, "placement", lambda asked, address: placement(asked, address, root))
    with pytest.raises(ValueError, match="no node 9"):
        RegisteredMemory(numa_node=9).allocate(5000)
    assert registered == []
