"""Page-locked memory with a double of cuda-python, which counts live allocations and fails on
request.
"""

# ruff: noqa: N802 (the double has cuda-python's names)

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from doubles import in_child, is_mapped
from fake_cuda import NAMES, FakeCuda

from pinstage import SlabPool
from pinstage._compat.calls import CudaCalls
from pinstage._memory import (
    _cuda,
    _resource,
    _streams,
    capturing_device,
    record_current_streams,
    refuse_capture,
)
from pinstage._memory import _pages as pages
from pinstage.errors import LeaseError, PinningError, PinstageError, StagingWarning
from pinstage.memory import (
    HostAllocMemory,
    PageableMemory,
    RegisteredMemory,
    SharedMemory,
    default_memory,
)

OUT_OF_MEMORY, INVALID_VALUE, UNLOADING = 2, 1, 4
ALREADY_MAPPED, ALREADY_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED = 208, 712, 800, 801


KINDS = {
    "host alloc": (HostAllocMemory, "cudaHostAlloc", "cudaFreeHost"),
    "registered": (RegisteredMemory, "cudaHostRegister", "cudaHostUnregister"),
    "shared": (SharedMemory, "cudaHostRegister", "cudaHostUnregister"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request, cuda):
    return request.param


@pytest.fixture
def memory(kind):
    yield kind[0](0)
    for block in _resource.LEAKED:  # else it counts in later tests of this process's memory
        pages.unmap(block.ptr, block.nbytes)
        if block.fd is not None:
            os.close(block.fd)


def test_a_block_is_pinned_aligned_and_returned(kind, memory, cuda):
    block = memory.allocate(3_000_001)
    assert memory.is_pinned
    assert memory.is_shared == (block.fd is not None) == (kind[0] is SharedMemory)
    assert block.ptr % mmap.PAGESIZE == 0
    assert block.nbytes == pages.round_up(3_000_001, memory.granularity)
    ctypes.memset(block.ptr, 1, block.nbytes)
    memory.deallocate(block)
    assert cuda.names() == [kind[1], kind[2]]
    (for_all_devices,) = (call[-1] for call in cuda.calls if call[0] == kind[1])
    assert for_all_devices == 1
    assert not is_mapped(block.ptr)


def test_no_allocation_makes_a_context_on_another_device(kind, cuda):
    memory = kind[0]("cuda:3")
    blocks = [memory.allocate(4096), memory.allocate(4096)]
    for block in blocks:
        memory.deallocate(block)
    assert cuda.contexts == ["device 3"]
    assert [call for call in cuda.calls if call[0] == "cuCtxPushCurrent"] == 4 * [
        ("cuCtxPushCurrent", "context of device 3")
    ]


def test_blocks_belong_to_the_device_current_at_allocation(kind, cuda, monkeypatch):
    memory = kind[0]()
    assert cuda.calls == []
    blocks = []
    for index in (1, 2):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        blocks.append(memory.allocate(4096))
    for block in blocks:
        memory.deallocate(block)
    pushed = [call[1] for call in cuda.calls if call[0] == "cuCtxPushCurrent"]
    assert pushed == [f"context of device {index}" for index in (1, 2, 1, 2)]


def test_blocks_cut_from_a_chunk_are_page_aligned(cuda):
    cuda.offset = 512
    memory = HostAllocMemory(0)
    block = memory.allocate(8192)
    assert block.ptr % mmap.PAGESIZE == 0
    ctypes.memset(block.ptr, 1, block.nbytes)
    (raw,) = cuda.allocated
    assert raw <= block.ptr
    assert block.ptr + block.nbytes <= raw + cuda.allocated[raw]
    memory.deallocate(block)


def test_an_unaligned_large_block_is_refused_and_returned(cuda):
    cuda.offset = 512
    with pytest.raises(RuntimeError, match="not page-aligned"):
        HostAllocMemory(0).allocate(4 << 20)
    assert cuda.allocated == {}


def test_large_registered_blocks_are_aligned_for_huge_pages(cuda):
    memory = RegisteredMemory(0)
    blocks = [memory.allocate((2 << 20) + 4096) for _ in range(3)]
    assert all(block.ptr % (2 << 20) == 0 for block in blocks)
    assert [block.nbytes for block in blocks] == 3 * [(2 << 20) + 4096]
    for block in blocks:
        memory.deallocate(block)


# Failure


@pytest.mark.parametrize(
    ("code", "error"), [(INVALID_VALUE, PinningError), (OUT_OF_MEMORY, MemoryError)]
)
def test_a_failed_allocation_names_call_error_and_size(kind, memory, cuda, code, error):
    kept = memory.allocate(4 << 20)
    cuda.fail(kind[1], code)
    with pytest.raises(
        error, match=rf"{kind[1]} of 4.00 MiB failed: {NAMES[code]} \(text {code}\)"
    ) as caught:
        memory.allocate(4 << 20)
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.call, caught.value.name, caught.value.nbytes) == (
        kind[1],
        NAMES[code],
        4 << 20,
    )
    assert cuda.last_error == 0
    assert repr(memory).endswith("1 blocks, 4.00 MiB>")
    address = next(call[1] for call in reversed(cuda.calls) if call[0] == kind[1])
    assert kind[0] is HostAllocMemory or not is_mapped(address)
    again = memory.allocate(4 << 20)
    assert again.is_pinned is not False
    memory.deallocate(kept)
    memory.deallocate(again)
    assert cuda.names() == [*[kind[1]] * 3, *[kind[2]] * 2]


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"])
def test_an_unusable_device_fails_only_the_allocation(kind, memory, cuda, call):
    cuda.fail(call, OUT_OF_MEMORY)
    with pytest.raises(_cuda.PinningMemoryError, match=f"{call} failed: cudaErrorMemoryAllocation"):
        memory.allocate(4096)
    cuda.last_error = 0  # the driver has no error to clear
    memory.deallocate(memory.allocate(4096))


def test_an_interrupt_while_pages_are_touched_rolls_back(cuda, monkeypatch):
    def interrupted(address, nbytes, **_):
        touched.append(address)
        raise KeyboardInterrupt

    touched = []
    monkeypatch.setattr(pages, "populate", interrupted)
    for memory in (RegisteredMemory(0), SharedMemory(0)):
        with pytest.raises(KeyboardInterrupt):
            memory.allocate(4 << 20)
        assert not is_mapped(touched[-1])
    assert cuda.registered == {}


def test_memory_cuda_keeps_stays_mapped_and_is_reported(kind, memory, cuda):
    blocks = [memory.allocate(1 << 20) for _ in range(2)]
    cuda.fail(kind[2], INVALID_VALUE)
    with pytest.warns(
        StagingWarning, match=rf"1.00 MiB stay mapped .* {kind[2]} failed: cudaErrorInv"
    ) as caught:
        memory.deallocate(blocks[0])
    assert caught[0].filename == __file__
    cuda.fail(kind[2], INVALID_VALUE)
    with warnings.catch_warnings(record=True) as silent:
        memory.deallocate(blocks[1])
    assert silent == []
    assert blocks == _resource.LEAKED
    assert all(is_mapped(block.ptr) for block in blocks)
    with pytest.raises(ValueError, match="deallocated before"):
        memory.deallocate(blocks[0])


def test_a_runtime_that_is_gone_is_no_news(kind, memory, cuda):
    block = memory.allocate(4096)
    cuda.fail(kind[2], UNLOADING)
    memory.deallocate(block)
    assert [block] == _resource.LEAKED


# Where CUDA must not be called


def test_an_interpreter_that_shuts_down_calls_no_cuda(kind, memory, cuda, monkeypatch):
    block = memory.allocate(4096)
    calls = len(cuda.calls)
    with monkeypatch.context() as patch:
        here = threading.get_ident()  # elsewhere, memory of an earlier test may be freed just now
        patch.setattr(sys, "is_finalizing", lambda: threading.get_ident() == here)
        memory.deallocate(block)
    assert len(cuda.calls) == calls
    assert is_mapped(block.ptr)
    memory.deallocate(block)


def test_a_forked_child_frees_nothing_without_cuda(kind, memory, cuda):
    block = memory.allocate(4096)

    def claim():
        calls = len(cuda.calls)
        memory.deallocate(block)
        memory.deallocate(block)
        return len(cuda.calls) == calls and (block.fd is None or os.fstat(block.fd))

    assert in_child(claim) == 0
    memory.deallocate(block)


def test_a_forked_child_is_refused_more(kind, memory, cuda):
    def claim():
        with pytest.raises(RuntimeError, match="forked from it: CUDA cannot pin here"):
            memory.allocate(4096)
        return True

    assert in_child(claim) == 0


def test_a_forked_child_asks_again_whether_cuda_works(cuda):
    assert _cuda.why_unusable() is None
    assert in_child(lambda: _cuda._bindings is None) == 0


def test_registered_pages_aren_t_copied_into_children(cuda):
    memory = RegisteredMemory(0)
    block = memory.allocate(4 << 20)
    assert in_child(lambda: not is_mapped(block.ptr)) == 0
    memory.deallocate(block)


# Which kind


def test_the_default_is_registered_memory_with_cuda(cuda):
    assert type(default_memory(0)) is RegisteredMemory
    assert cuda.contexts == []


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("HOST_REGISTER_SUPPORTED", 0), ("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES", 1)],
)
def test_the_default_is_driver_memory_where_registering_fails(cuda, attribute, value):
    cuda.attributes[attribute] = value
    assert type(default_memory(0)) is HostAllocMemory


def test_unregistered_shared_memory_calls_no_cuda(cuda):
    memory = SharedMemory(0, register=False)
    memory.deallocate(memory.allocate(4096))
    assert (memory.is_pinned, cuda.calls) == (False, [])


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NOT_PERMITTED])
def test_a_platform_that_registers_nothing_is_asked_once(cuda, code):
    memory = SharedMemory(0)
    blocks = [memory.allocate(1 << 20)]
    cuda.refuse("cudaHostRegister", code, 1)
    with pytest.warns(StagingWarning, match=NAMES[code]) as told:
        blocks += [memory.allocate(1 << 20) for _ in range(3)]
    assert [block.is_pinned for block in blocks] == [True, False, False, False]
    assert len(told) == 1
    assert cuda.names() == ["cudaHostRegister"] * 2
    assert {block.ptr for block in blocks[:1]} == set(cuda.registered)
    for block in blocks:
        ctypes.memset(block.ptr, 1, block.nbytes)
        memory.deallocate(block)


@pytest.mark.usefixtures("nothing_said")
def test_a_warning_as_error_loses_no_block(cuda):
    cuda.refuse("cudaHostRegister", NOT_SUPPORTED, 1)
    memory = SharedMemory(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = memory.allocate(1 << 20)
    assert not block.is_pinned
    memory.deallocate(block)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("code", [ALREADY_REGISTERED, ALREADY_MAPPED])
def test_an_address_that_another_library_left_registered(kind, memory, cuda, code):
    """A pool fails there again and again, and leaves nothing behind."""
    if kind[0] is HostAllocMemory:
        pytest.skip("the driver chooses its addresses")
    with SlabPool("64MiB", memory=memory) as pool:
        cuda.refuse("cudaHostRegister", code, 200)
        for attempt in range(200):
            with pytest.raises(
                (PinningError, MemoryError), match=rf"{NAMES[code]}.*new process mends that$"
            ):
                pool.acquire(4 << 20)
            assert (pool.stats().held_bytes, pool.stats().held_slabs) == (0, 0)
            if attempt == 20:
                before = resident_bytes()
        assert resident_bytes() < before + (4 << 20)


def test_less_than_one_thread_is_refused(cuda):
    with pytest.raises(ValueError, match="threads must be 1 or more: 0"):
        RegisteredMemory(0, threads=0)


# Bindings and driver that do not work


@pytest.fixture
def torch_with_a_gpu(monkeypatch):
    monkeypatch.setattr(_cuda, "_bindings", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def bindings(monkeypatch):
    """Replace cuda-python's modules with doubles."""

    def put(driver, runtime):
        package = types.SimpleNamespace(driver=driver, runtime=runtime)
        monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace(bindings=package))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)

    return put


class _NoDriver:
    def cuInit(self, flags):
        raise RuntimeError("DynamicLibNotFoundError")


def _old_driver():
    fake = FakeCuda()
    fake.cuInit = lambda flags: (0,)
    fake.cudaGetDeviceCount = lambda: (INVALID_VALUE, None)
    return fake


@pytest.mark.parametrize("driver", [_NoDriver, _old_driver])
def test_broken_bindings_are_reported_and_pageable_memory_used(torch_with_a_gpu, bindings, driver):
    fake = driver()
    bindings(fake, fake)
    for make, expected in (
        (lambda: default_memory(0), PageableMemory),
        (lambda: SharedMemory(0), SharedMemory),
    ):
        with pytest.warns(
            StagingWarning, match=r"pageable memory, .*; install a cuda-python for CUDA 13.0"
        ):
            memory = make()
        assert type(memory) is expected
        assert not memory.is_pinned
    with pytest.raises(
        RuntimeError, match=r"RegisteredMemory needs CUDA: cuda-python cannot use the driver"
    ):
        RegisteredMemory(0)


def test_missing_bindings_are_reported(torch_with_a_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="cuda-python cannot be imported"):
        HostAllocMemory(0)


def test_working_bindings_are_asked_once(torch_with_a_gpu, bindings):
    fake = FakeCuda()
    asked = []
    fake.cuInit = lambda flags: asked.append(flags) or (0,)
    fake.cudaGetDeviceCount = lambda: (0, 1)
    bindings(fake, fake)
    assert _cuda.why_unusable() is None
    assert _cuda.why_unusable() is None
    assert asked == [0]


def test_another_thread_sets_no_current_device(monkeypatch):
    # torch may return to a device without setting it; setting it would make a context there
    current, entered = [1], []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current[0])
    monkeypatch.setattr(
        "torch.cuda.device", lambda index: contextlib.nullcontext(entered.append(index))
    )
    surroundings = _cuda.as_called_here()
    with surroundings():
        assert entered == []
    current[0] = 0
    with surroundings():
        assert entered == [1]


NO_NULL_STREAM = 0x5EED


class Streams:
    """Stands for torch with three devices: current streams, and recorded events."""

    def __init__(self, monkeypatch):
        self.current, self.recorded, self.capturing = 1, [], None
        self.handles = [NO_NULL_STREAM] * 3
        calls = CudaCalls(lambda: self.current, None, self.handles.__getitem__, None)
        monkeypatch.setattr(_streams, "cuda_calls", lambda: calls)
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.setattr("torch.cuda.current_stream", lambda index: f"stream of {index}")
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", self.is_capturing)
        monkeypatch.setattr(_streams, "on_device", self.on_device)
        monkeypatch.setattr(
            _streams.DeviceEvent, "of", lambda index: types.SimpleNamespace(record=self.record)
        )

    def is_capturing(self):
        assert self.handles[self.current] == NO_NULL_STREAM, "the null stream is never asked"
        return self.current == self.capturing

    @contextlib.contextmanager
    def on_device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def record(self, stream):
        self.recorded.append((self.current, stream))


def test_current_streams_are_recorded_where_a_context_is(cuda, monkeypatch):
    streams = Streams(monkeypatch)
    assert record_current_streams() == ()
    for memory in (RegisteredMemory(0), RegisteredMemory(2)):
        memory.deallocate(memory.allocate(1))
    assert len(record_current_streams()) == 2
    assert streams.recorded == [(0, "stream of 0"), (2, "stream of 2")]
    assert streams.current == 1
    assert cuda.contexts == ["device 0", "device 2"]


def test_nothing_is_recorded_before_torch_uses_cuda(cuda):
    memory = RegisteredMemory(0)
    memory.deallocate(memory.allocate(1))
    assert record_current_streams() == ()


def test_a_captured_stream_is_not_recorded(cuda, monkeypatch):
    streams = Streams(monkeypatch)
    memory = RegisteredMemory(2)
    memory.deallocate(memory.allocate(1))
    streams.capturing = 2
    with pytest.raises(
        LeaseError, match=r"stream of cuda:2 captures a graph.*; call lease.release\(after=event\)"
    ):
        record_current_streams()
    assert streams.recorded == []


@pytest.mark.parametrize("null", [0, 1])
def test_a_null_stream_is_recorded_unasked(cuda, monkeypatch, null):
    streams = Streams(monkeypatch)
    memory = RegisteredMemory(2)
    memory.deallocate(memory.allocate(1))
    streams.handles[2] = null
    assert len(record_current_streams()) == 1


@pytest.mark.parametrize("capturing", [None, 0, 1, 2])
@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_capture_on_either_current_stream_is_seen(monkeypatch, capturing, index):
    streams = Streams(monkeypatch)
    streams.capturing = capturing
    assert capturing_device(index) == (capturing if capturing in (1, index) else None)
    assert streams.current == 1


def test_null_streams_are_never_asked_whether_they_capture(monkeypatch):
    streams = Streams(monkeypatch)
    streams.handles[:] = 0, 1, 0
    assert [capturing_device(index) for index in (None, 0, 2)] == [None] * 3


def test_a_capture_is_refused_with_the_remedy(monkeypatch):
    streams = Streams(monkeypatch)
    refuse_capture(2)
    streams.capturing = 2
    refuse_capture()
    with pytest.raises(PinstageError, match=r"captures a graph: cuda:2\. Stage .*, out=tensors"):
        refuse_capture(2)


def test_no_capture_is_seen_before_torch_uses_cuda():
    assert capturing_device(0) is None


def test_a_silent_device_is_an_error(cuda, monkeypatch):
    Streams(monkeypatch)
    cuda.fail("cuDevicePrimaryCtxGetState", INVALID_VALUE)
    with pytest.raises(PinningError, match="cuDevicePrimaryCtxGetState failed"):
        record_current_streams()
