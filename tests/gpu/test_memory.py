"""The memory resources on a real device."""

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from doubles import in_child, is_mapped

from pinstage._memory import (
    HostAllocMemory,
    PageableMemory,
    RegisteredMemory,
    SharedMemory,
    _cuda,
    _resource,
    attach,
    default_memory,
)
from pinstage._memory import _pages as pages
from pinstage.errors import PinningError, StagingWarning

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
KINDS = {
    "host alloc": HostAllocMemory,
    "registered": RegisteredMemory,
    "registered, small pages": lambda device: RegisteredMemory(device, huge_pages=False),
    "shared": SharedMemory,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def memory(request, cuda_device):
    return request.param(cuda_device)


@pytest.fixture(autouse=True)
def _no_leaks(cuda_device):
    yield
    assert _resource.LEAKED == []


def as_tensor(block):
    memory = (ctypes.c_ubyte * block.nbytes).from_address(block.ptr)
    return torch.frombuffer(memory, dtype=torch.uint8)


def assert_cuda_works(device):
    """Call CUDA through both runtimes; a pending error would be raised by one of them."""
    from cuda.bindings import runtime

    torch.zeros(1 << 20, device=device).sum().item()
    torch.cuda.synchronize(device)
    assert torch.empty(1 << 20, dtype=torch.uint8).pin_memory().is_pinned()
    assert (
        torch.ones(1 << 16, pin_memory=True).to(device, non_blocking=True).sum().item() == 1 << 16
    )
    assert [int(code) for code in runtime.cudaPeekAtLastError()] == [0]
    code, address = runtime.cudaMalloc(4096)
    assert int(code) == 0
    assert [int(code) for code in runtime.cudaFree(address)] == [0]
    assert [int(code) for code in runtime.cudaDeviceSynchronize()] == [0]


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 2 * MIB, 33 * MIB + 5])
def test_torch_sees_a_whole_block_as_pinned(memory, nbytes):
    block = memory.allocate(nbytes)
    assert block.ptr % pages.PAGE_BYTES == 0
    assert block.nbytes >= nbytes
    whole = as_tensor(block)
    assert whole.is_pinned()
    assert whole[-1:].is_pinned()
    memory.deallocate(block)


def test_blocks_are_page_aligned_beside_small_pinned_tensors(memory):
    tensors = [torch.ones(3).pin_memory() for _ in range(5)]
    blocks = [memory.allocate(nbytes) for nbytes in (1, 4096, 12_288, 65_536) for _ in range(4)]
    assert all(block.ptr % pages.PAGE_BYTES == 0 for block in blocks)
    for block in blocks:
        memory.deallocate(block)
    assert len(tensors) == 5


def test_what_is_written_reaches_the_device(memory, cuda_device):
    block = memory.allocate(8 * MIB)
    source = torch.randint(0, 256, (block.nbytes,), dtype=torch.uint8)
    as_tensor(block).copy_(source)
    arrived = as_tensor(block).to(cuda_device, non_blocking=True)
    assert torch.equal(arrived.cpu(), source)
    memory.deallocate(block)


def test_pageable_memory_is_not_pinned(cuda_device):
    memory = PageableMemory()
    block = memory.allocate(MIB)
    assert not as_tensor(block).is_pinned()
    memory.deallocate(block)


def test_the_default_is_page_locked(cuda_device):
    memory = default_memory(cuda_device)
    assert memory.is_pinned
    block = memory.allocate(MIB)
    assert as_tensor(block).is_pinned()
    memory.deallocate(block)


def test_without_a_device_the_current_one_pins():
    memory = RegisteredMemory()
    block = memory.allocate(MIB)
    assert block._device == torch.cuda.current_device()
    assert as_tensor(block).is_pinned()
    memory.deallocate(block)


def test_a_deallocated_block_is_unmapped(cuda_device):
    for memory in (RegisteredMemory(cuda_device), SharedMemory(cuda_device)):
        block = memory.allocate(4 * MIB)
        memory.deallocate(block)
        assert not is_mapped(block.ptr)


def test_torch_can_pin_after_everything_was_given_back(memory, cuda_device):
    blocks = [memory.allocate(nbytes) for nbytes in (4096, 3 * MIB, 64 * MIB, 4096 * 7)]
    for block in blocks:
        memory.deallocate(block)
    tensors = [
        torch.ones(nbytes, dtype=torch.uint8).pin_memory()
        for nbytes in (100, 4096, 3 * MIB, 64 * MIB)
    ]
    assert all(tensor.is_pinned() for tensor in tensors)
    assert_cuda_works(cuda_device)


def test_threads_allocate_and_deallocate_at_once(memory, cuda_device, background):
    start = threading.Barrier(8)
    pinned = []

    def work():
        start.wait()
        for nbytes in (4096, MIB, 5 * MIB) * 3:
            block = memory.allocate(nbytes)
            pinned.append(as_tensor(block).is_pinned())
            memory.deallocate(block)

    for working in [background(work) for _ in range(8)]:
        working.result()
    assert pinned == 72 * [True]
    assert_cuda_works(cuda_device)


# Failure


def test_registering_twice_fails_and_leaves_no_error_behind(cuda_device):
    memory = RegisteredMemory(cuda_device)
    block = memory.allocate(4 * MIB)
    with pytest.raises(
        PinningError, match=r"cudaHostRegister of 4.00 MiB failed: cudaErrorHostMemoryAlreadyReg"
    ):
        _cuda.register(block.ptr, block.nbytes, block._device)
    assert_cuda_works(cuda_device)
    memory.deallocate(block)


def test_a_failed_allocation_leaves_no_error_behind(memory, cuda_device):
    with pytest.raises((MemoryError, PinningError)):
        memory.allocate(1 << 50)
    assert repr(memory).endswith("0 blocks, 0 B>")
    assert_cuda_works(cuda_device)


@pytest.mark.parametrize("kind", [RegisteredMemory, SharedMemory])
def test_unlockable_pages_are_rolled_back(kind, cuda_device, monkeypatch):
    mapped = []

    def forbid(address, nbytes, **_):
        mapped.append(address)
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0) == 0  # PROT_NONE

    memory = kind(cuda_device)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(pages, "populate", forbid)
        with pytest.raises(PinningError, match=r"cudaHostRegister of 4.00 MiB failed"):
            memory.allocate(4 * MIB)
    assert not is_mapped(mapped[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert_cuda_works(cuda_device)
    block = memory.allocate(4 * MIB)
    assert as_tensor(block).is_pinned()
    memory.deallocate(block)


def test_a_failed_unregistration_leaks_and_leaves_no_error(cuda_device, monkeypatch):
    monkeypatch.setattr(_resource, "LEAKED", [])
    memory = RegisteredMemory(cuda_device)
    block = memory.allocate(MIB)
    _cuda.unregister(block.ptr, block._device)
    with pytest.warns(
        StagingWarning, match=r"1.00 MiB stay mapped .* cudaHostUnregister failed: cudaError"
    ):
        memory.deallocate(block)
    assert is_mapped(block.ptr)
    assert_cuda_works(cuda_device)
    pages.unmap(block.ptr, block.nbytes)
    monkeypatch.undo()


# Other processes


def through_a_second_mapping(block):
    with contextlib.closing(attach(block.fd, block.nbytes)) as mapping:
        assert mapping.ptr != block.ptr
        ctypes.memset(mapping.ptr, 5, mapping.nbytes)


def in_a_forked_child(block):
    assert in_child(lambda: ctypes.memset(block.ptr, 5, block.nbytes)) == 0


@pytest.mark.parametrize("write", [through_a_second_mapping, in_a_forked_child])
def test_writes_to_shared_memory_reach_the_device(cuda_device, write):
    memory = SharedMemory(cuda_device)
    block = memory.allocate(4 * MIB)
    write(block)
    assert (as_tensor(block).to(cuda_device, non_blocking=True) == 5).all()
    memory.deallocate(block)


def test_a_fork_does_not_copy_page_locked_memory(memory):
    # Linux 5.9 and later copies page-locked private pages in fork, unless the child doesn't get
    # them.
    block = memory.allocate(GIB)

    def private_bytes():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty")
        )

    assert in_child(lambda: private_bytes() < GIB // 2) == 0
    memory.deallocate(block)


def test_what_a_forked_child_sees_of_each_kind(memory):
    block = memory.allocate(4 * MIB)
    ctypes.memset(block.ptr, 7, block.nbytes)
    status = in_child(lambda: ctypes.string_at(block.ptr, 1) == b"\x07")
    if isinstance(memory, RegisteredMemory):
        assert status == -signal.SIGSEGV  # loud, as documented; never stale bytes
    elif memory.is_shared:
        assert status == 0
    memory.deallocate(block)


def test_a_forked_child_leaves_the_parents_blocks_alone(memory, cuda_device):
    block = memory.allocate(MIB)
    assert in_child(lambda: memory.deallocate(block) is None) == 0
    assert as_tensor(block).is_pinned()
    assert_cuda_works(cuda_device)
    memory.deallocate(block)


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Exception ignored" not in result.stderr


def test_only_an_allocation_makes_a_context(cuda_device):
    run("""
from cuda.bindings import driver
from pinstage._memory import *
kinds = [default_memory(0), HostAllocMemory(0), RegisteredMemory(0), SharedMemory(0)]
is_active = lambda: driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])[2]
assert not is_active(), "a resource made a context before it was asked for memory"
for memory in kinds:
    memory.deallocate(memory.allocate(1 << 20))
assert is_active()
assert repr(driver.cuCtxGetCurrent()[1]) == repr(driver.CUcontext(0)), "a context stayed current"
""")


def test_blocks_alive_at_exit_are_harmless(cuda_device):
    run("""
import torch
from pinstage._memory import *
class Late:
    def __init__(self, memory):
        self.memory, self.block = memory, memory.allocate(1 << 20)
    def __del__(self):
        self.memory.deallocate(self.block)
late = [Late(kind(0)) for kind in (HostAllocMemory, RegisteredMemory, SharedMemory)]
late.append(late)
torch.ones(3).pin_memory().to("cuda:0")
""")


# Speed


def test_registering_takes_a_third_of_cudahostalloc_s_time(cuda_device):
    times = {RegisteredMemory: [], HostAllocMemory: []}
    for turn in range(7):
        for kind, took in times.items():
            memory = kind(cuda_device)
            started = time.perf_counter()
            block = memory.allocate(GIB)
            # A fresh virtual machine is slow the first time its memory is touched, for either kind.
            if turn >= 2:
                took.append(time.perf_counter() - started)
            assert block.nbytes == GIB
            memory.deallocate(block)
    # The minimum excludes other load on the machine.
    assert min(times[RegisteredMemory]) <= min(times[HostAllocMemory]) / 3, times


def test_pages_on_the_device_s_node_are_pinned(cuda_device):
    memory = RegisteredMemory(cuda_device, numa_node="auto")
    assert "node" in memory.numa
    torchs = torch.cuda.get_device_properties(cuda_device)
    address = f"{torchs.pci_domain_id:04x}:{torchs.pci_bus_id:02x}:{torchs.pci_device_id:02x}.0"
    assert _cuda.pci_address(0) == address
    block = memory.allocate(8 * MIB)
    try:
        assert as_tensor(block).is_pinned()
        assert not as_tensor(block).any()
    finally:
        memory.deallocate(block)
