"""Memory resources that need no CUDA, and properties of all kinds."""

import ctypes
import mmap
import os
import signal
import subprocess
from ctypes import memset, string_at
from pathlib import Path

import pytest
import torch
import warm
from doubles import in_child, is_mapped, shared_files

from pinstage._memory import _pages as pages
from pinstage._memory import (
    attach,
)
from pinstage.memory import (
    Block,
    HostAllocMemory,
    MemoryResource,
    PageableMemory,
    RegisteredMemory,
    SharedMemory,
    default_memory,
)

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what happens without CUDA"
)

# Some versions of torch import cuda-python themselves.
NO_CUDA = """
assert not [name for name in set(sys.modules) - torchs_own if name.split(".")[0] == "cuda"], "cuda-python was imported"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
"""


def plain_shared():
    return SharedMemory(register=False)


@pytest.fixture(params=[PageableMemory, plain_shared], ids=["pageable", "shared"])
def memory(request):
    return request.param()


def test_the_kinds_are_memory_resources(memory):
    assert isinstance(memory, MemoryResource)
    assert not memory.is_pinned


def test_a_block_is_aligned_zeroed_and_usable(memory):
    open_before = shared_files()
    block = memory.allocate(100_001)
    assert block.ptr % mmap.PAGESIZE == 0
    assert block.nbytes >= 100_001
    assert block.nbytes % memory.granularity == 0
    assert string_at(block.ptr, block.nbytes) == bytes(block.nbytes)
    memset(block.ptr, 7, block.nbytes)
    assert string_at(block.ptr, block.nbytes) == b"\x07" * block.nbytes
    memory.deallocate(block)
    assert not is_mapped(block.ptr)
    assert shared_files() <= open_before


def test_pageable_memory_holds_exactly_what_was_asked():
    memory = PageableMemory()
    block = memory.allocate(12_345)
    assert (memory.granularity, block.nbytes) == (1, 12_345)
    memory.deallocate(block)


@pytest.mark.parametrize("nbytes", [0, -1, -4096])
def test_an_empty_or_negative_block_is_refused(memory, nbytes):
    with pytest.raises(ValueError, match=r"empty|negative"):
        memory.allocate(nbytes)


def test_a_block_is_returned_once_to_its_resource(memory):
    block, stranger = memory.allocate(4096), PageableMemory().allocate(4096)
    for wrong in (stranger, Block(block.ptr, block.nbytes)):
        with pytest.raises(ValueError, match="another resource"):
            memory.deallocate(wrong)
    assert is_mapped(stranger.ptr)
    memory.deallocate(block)
    with pytest.raises(ValueError, match="deallocated before"):
        memory.deallocate(block)


def test_an_impossible_size_is_a_memory_error(memory):
    open_before = shared_files()
    with pytest.raises((MemoryError, OSError)):
        memory.allocate(1 << 62)
    assert repr(memory).endswith("0 blocks, 0 B>")
    assert shared_files() <= open_before


# Shared


@pytest.fixture
def block():
    memory = plain_shared()
    block = memory.allocate(8192)
    yield block
    memory.deallocate(block)


def test_what_a_forked_child_writes_is_read_here(block):
    assert in_child(lambda: memset(block.ptr, 9, block.nbytes)) == 0
    assert string_at(block.ptr, block.nbytes) == b"\x09" * block.nbytes


def test_another_process_s_writes_are_read_here(block):
    code = f"""
import contextlib, ctypes, sys, torch
torchs_own = set(sys.modules)
from pinstage._memory import attach
with contextlib.closing(attach(0, {block.nbytes})) as mapping:
    ctypes.memset(mapping.ptr, 5, mapping.nbytes)
{NO_CUDA}
"""
    subprocess.run(warm.command("-c", code), stdin=block.fd, check=True)
    assert string_at(block.ptr, block.nbytes) == b"\x05" * block.nbytes


def test_an_attached_mapping_outlives_its_descriptor(block):
    fd = os.dup(block.fd)
    mapping = attach(fd, 4096)
    os.close(fd)
    assert mapping.ptr % mmap.PAGESIZE == 0
    memset(mapping.ptr, 3, 4096)
    assert string_at(block.ptr, 4096) == b"\x03" * 4096
    mapping.close()
    mapping.close()
    assert not is_mapped(mapping.ptr)


@pytest.mark.parametrize("nbytes", [0, -1, 8193])
def test_more_than_a_block_has_is_not_attached(block, nbytes):
    with pytest.raises(ValueError, match="the file has 8192"):
        attach(block.fd, nbytes)


def test_no_process_can_truncate_a_shared_block(block):
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 4096)


# Pages


def test_an_aligned_mapping_keeps_nothing_beside_it():
    before = mapped_bytes()
    for _ in range(100):
        address = pages.map_pages(3 << 20, alignment=pages.HUGE_PAGE_BYTES)
        assert address % pages.HUGE_PAGE_BYTES == 0
        pages.unmap(address, 3 << 20)
    assert mapped_bytes() - before < 100 << 20  # the slack of all of them would be 200 MiB


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize(
    "advice", [pages.MADV_POPULATE_WRITE, 0x7FFF], ids=["populate", "unknown to every kernel"]
)
@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize(
    "nbytes", [4096, pages.POPULATE_PIECE_BYTES, 2 * pages.POPULATE_PIECE_BYTES + 4096]
)
def test_populated_pages_have_their_memory_and_are_zero(monkeypatch, threads, nbytes, advice):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", advice)
    address = pages.map_pages(nbytes)
    assert resident_pages(address, nbytes) == 0
    pages.populate(address, nbytes, threads=threads)
    assert resident_pages(address, nbytes) == nbytes // mmap.PAGESIZE
    assert not any(string_at(address, nbytes))
    pages.unmap(address, nbytes)


def resident_pages(address, nbytes):
    residency = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), residency) == 0
    )
    return sum(page & 1 for page in residency)


def test_touching_more_than_exists_is_refused():
    address = pages.map_pages(4096)
    with pytest.raises(MemoryError, match=r"1.00 PiB asked, .* exist"):
        pages.populate(address, 1 << 50)
    pages.unmap(address, 4096)


def test_touching_unmapped_memory_is_an_error():
    address = pages.map_pages(1 << 26)
    pages.unmap(address, 1 << 26)
    with pytest.raises((MemoryError, OSError), match="MADV_POPULATE_WRITE"):
        pages.populate(address, 1 << 26, threads=2)


def test_a_refused_unmapping_is_an_error():
    with pytest.raises(OSError, match=r"munmap of 4.00 KiB failed: Invalid argument"):
        pages.unmap(1, 4096)


# Without CUDA


@without_cuda
@pytest.mark.parametrize("kind", [HostAllocMemory, RegisteredMemory])
def test_page_locked_kinds_without_cuda_name_an_alternative(kind):
    with pytest.raises(
        RuntimeError,
        match=rf"{kind.__name__} needs CUDA: .*; use PageableMemory\(\) or default_mem",
    ):
        kind()


@without_cuda
def test_shared_memory_without_cuda_is_pageable():
    memory = SharedMemory()
    assert (memory.is_pinned, memory.is_shared) == (False, True)


@without_cuda
@pytest.mark.parametrize("device", [None, 0, "cuda:0"])
def test_the_default_without_cuda_is_pageable(device):
    assert type(default_memory(device)) is PageableMemory


@pytest.mark.parametrize("kind", [HostAllocMemory, RegisteredMemory, SharedMemory])
def test_page_locked_memory_for_the_cpu_is_refused(kind):
    with pytest.raises(ValueError, match=r"CUDA device, not 'cpu'; use PageableMemory\(\)"):
        kind("cpu")


def test_the_default_for_the_cpu_is_pageable():
    assert type(default_memory(torch.device("cpu"))) is PageableMemory


def test_a_signalled_child_differs_from_a_failing_one():
    # The GPU tests use the double above to prove a crash, so it must detect one.
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    assert in_child(lambda: False) == 2
