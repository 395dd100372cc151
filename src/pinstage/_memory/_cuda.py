"""The only module that calls CUDA to pin memory; return codes become exceptions here.

The calls go through cuda-python, because ``torch.cuda.cudart()`` has no ``cudaHostAlloc``,
``cudaFreeHost`` or ``cudaGetLastError``. Its runtime library is not the same instance as torch's:
an error left behind in one is neither seen nor cleared by the other, so each failed call clears its
own. The bindings are imported at the first use, never before, and release the interpreter lock in
every call (cuda-bindings 12.9.1 release notes).
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _host
from .._sizes import format_bytes
from ..errors import CudaUnavailableError, PinningError, StagingWarning

Device = int | str | torch.device | None


class PinningMemoryError(PinningError, MemoryError):
    """Too little host memory to page-lock, or device memory for a context. ``except MemoryError``
    catches it.
    """


_OUT_OF_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY")
_LEFT_REGISTERED = ("cudaErrorHostMemoryAlreadyRegistered", "cudaErrorAlreadyMapped")
_REMEDIES = dict.fromkeys(_OUT_OF_MEMORY, "ask for less, or free page-locked memory first")
_REMEDIES |= dict.fromkeys(
    _LEFT_REGISTERED,
    "a library has unmapped registered memory without unregistering it, and the driver still holds "
    "these addresses: only a new process mends that",
)

PLATFORM_REFUSES = {"cudaErrorNotSupported", "cudaErrorNotPermitted"}
"""Errors of a platform that registers no memory at all, such as confidential computing."""


def more_may_help(error: Exception) -> bool:
    """Return whether a refusal could be due to too little memory."""
    return not (isinstance(error, PinningError) and error.name in _LEFT_REGISTERED)


@dataclass(frozen=True, slots=True)
class Bindings:
    """cuda-python's two modules, which were checked to work; tests use doubles instead."""

    runtime: Any
    driver: Any
    contexts: dict[int, Any] = field(default_factory=dict)
    """The primary context of each device used. Retained once and never released, as torch does:
    releasing the last reference would destroy the context, and page-locked memory with it."""

    def call(self, name: str, *args: Any, nbytes: int | None = None) -> Any:
        """Call a runtime or driver function; return its last result, or clear the error and
        raise.
        """
        is_runtime = name.startswith("cuda")
        code, *results = getattr(self.runtime if is_runtime else self.driver, name)(*args)
        if not int(code):
            return results[-1] if results else None
        if is_runtime:  # only the runtime keeps a last error
            self.runtime.cudaGetLastError()
        error, what = self.describe(name, code)
        size = "" if nbytes is None else f" of {format_bytes(nbytes)}"
        remedy = f"; {_REMEDIES[error]}" if error in _REMEDIES else ""
        kind = PinningMemoryError if error in _OUT_OF_MEMORY else PinningError
        raise kind(f"{name}{size} {what}{remedy}", call=name, name=error, nbytes=nbytes)

    def describe(self, call: str, code: Any) -> tuple[str, str]:
        """Return CUDA's name for a call's error, and a text that says what happened."""
        module, prefix = (self.runtime, "cuda") if call.startswith("cuda") else (self.driver, "cu")
        name, text = (
            getattr(module, f"{prefix}GetError{what}")(code)[1].decode(errors="replace")
            for what in ("Name", "String")
        )
        return name, f"failed: {name} ({text})"


_bindings: Bindings | None = None


def _forget() -> None:
    # A working driver doesn't work in a child forked after CUDA was initialised: check again there.
    global _bindings  # noqa: PLW0603
    _bindings = None


os.register_at_fork(after_in_child=_forget)


def why_unusable() -> str | None:
    """Return why memory cannot be page-locked in this process; None if it can.

    Initialises the CUDA driver where there is one, as ``torch.cuda.is_available()`` does; makes no
    context. Errors of the bindings, such as without a driver, are returned and not raised.
    """
    global _bindings  # noqa: PLW0603
    if _bindings is not None:
        return None
    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        return f"cuda-python cannot be imported ({error})"
    bindings = Bindings(runtime, driver)
    try:
        bindings.call("cuInit", 0)
        bindings.call("cudaGetDeviceCount")
    except RuntimeError as error:  # PinningError, and the loader's DynamicLibNotFoundError
        return f"cuda-python cannot use the driver ({error})"
    _bindings = bindings
    return None


def is_usable(stacklevel: int = 3) -> bool:
    """Return whether memory can be page-locked; warn if it cannot although torch has a GPU."""
    reason = why_unusable()
    if reason is not None and torch.version.cuda is not None and torch.cuda.is_available():
        warnings.warn(
            "staging uses pageable memory, which is slow, though PyTorch has a CUDA device: "
            f"{reason}; install a cuda-python for CUDA {torch.version.cuda}",
            StagingWarning,
            stacklevel=stacklevel,
        )
    return reason is None


def disregard_captures() -> None:
    """Let this thread make calls that CUDA forbids by default while any thread captures a graph.

    Querying an event and allocating are such calls: either would fail, and invalidate the capture.
    The relaxed mode is meant for threads whose work is independent of the capture
    (``cuThreadExchangeStreamCaptureMode`` in CUDA's manual).
    """
    if why_unusable() is None:
        bindings = require()
        relaxed = bindings.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        bindings.call("cuThreadExchangeStreamCaptureMode", relaxed)


def as_called_here() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function whose context lets another thread page-lock and free memory as this thread
    would.

    In that context, torch's current device of this thread is current, and no call invalidates a
    capture. A device that is already current is not set again: going back to a device without a
    context would make one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    device = torch.cuda.current_device()

    def surroundings() -> AbstractContextManager[Any]:
        if _bindings is not None:
            disregard_captures()
        return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)

    return surroundings


def require(kind: str = "page-locked memory") -> Bindings:
    """Return the bindings; raise a ``CudaUnavailableError`` that says what to use instead where
    they don't work.
    """
    reason = why_unusable()
    if reason is not None:
        raise CudaUnavailableError(
            f"{kind} needs CUDA: {reason}; use PageableMemory() or default_memory()"
        )
    assert _bindings is not None
    return _bindings


def is_not_cuda(device: Device) -> bool:
    """Return whether a device is given that isn't a CUDA device."""
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type != "cuda"
    )


def device_index(device: Device) -> int:
    """Return the index of a CUDA device; None, or "cuda" alone, means torch's current device in
    this thread.
    """
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


@contextmanager
def in_context_of(index: int) -> Iterator[Bindings]:
    """Make a device's primary context current in this thread, and restore the previous one
    afterwards.

    Pinning uses the current context, or makes one: 600 MiB, perhaps on the wrong GPU
    (LMCache#4018). The runtime follows the driver's current context ("Interactions with the CUDA
    Driver API"), so a push and a pop make a context on ``index`` and nowhere else.
    ``torch.cuda.device`` isn't enough: it only compares with the device that torch considers
    current, and doesn't always switch back.
    """
    bindings = require()
    if index not in bindings.contexts:
        bindings.contexts[index] = bindings.call(
            "cuDevicePrimaryCtxRetain", bindings.call("cuDeviceGet", index)
        )
    bindings.call("cuCtxPushCurrent", bindings.contexts[index])
    try:
        yield bindings
    finally:
        # Not checked: it can only report what an earlier, asynchronous call did.
        bindings.driver.cuCtxPopCurrent()


def has_context(index: int) -> bool:
    """Return whether this process has a primary context on a device. Makes none."""
    bindings = require()
    return bool(bindings.call("cuDevicePrimaryCtxGetState", bindings.call("cuDeviceGet", index)))


def who_registers(device: Device) -> tuple[int, str]:
    """Return the device that can page-lock memory, -1 for none, and why registering doesn't do
    that, empty if it does.

    Registering doesn't page-lock as ``cudaHostAlloc`` does under WSL2, where the device cannot
    register, and where it uses the host's page tables (Grace Hopper). Makes no context. Warns as
    `is_usable` does.
    """
    if is_not_cuda(device):
        return -1, f"the device is {device}"
    if not is_usable(stacklevel=4):
        return -1, str(why_unusable())
    index = device_index(device)
    is_host_memory = attribute(index, "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
    if _host.is_wsl() or not can_register(index) or is_host_memory:
        return index, f"registering doesn't page-lock memory for cuda:{index} on this system"
    return index, ""


def attribute(index: int, name: str) -> int:
    """Return an attribute of a device; -1 if these bindings don't know it. Makes no context."""
    bindings = require()
    known = getattr(bindings.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if known is None:
        return -1
    return int(bindings.call("cuDeviceGetAttribute", known, bindings.call("cuDeviceGet", index)))


def can_register(index: int) -> bool:
    """Return whether a device can register memory: not on GB10, for example."""
    return attribute(index, "HOST_REGISTER_SUPPORTED") != 0


def reads_pageable_memory(index: int) -> bool:
    """Return whether a device reads ordinary memory itself, as Grace, GB10 and HMM do.

    Then a copy from ordinary memory may read it after the call has returned.
    """
    return why_unusable() is None and attribute(index, "PAGEABLE_MEMORY_ACCESS") > 0


def pci_address(index: int) -> str:
    """Return a device's PCI address, such as ``"0000:1b:00.0"``. Makes no context."""
    bindings = require()
    text = bindings.call("cuDeviceGetPCIBusId", 32, bindings.call("cuDeviceGet", index))
    return bytes(text).split(b"\0")[0].decode().lower()


def host_alloc(nbytes: int, device: int) -> int:
    """``cudaHostAlloc``: page-locked memory for all devices, from the driver; returns its
    address.
    """
    with in_context_of(device) as bindings:
        flags = bindings.runtime.cudaHostAllocPortable
        return int(bindings.call("cudaHostAlloc", nbytes, flags, nbytes=nbytes))


def free_host(address: int, device: int) -> None:
    """``cudaFreeHost``: waits for the device."""
    with in_context_of(device) as bindings:
        bindings.call("cudaFreeHost", address)


def register(address: int, nbytes: int, device: int) -> None:
    """``cudaHostRegister``: page-lock mapped memory, for all devices.

    One call for all of it: CUDA refuses a copy that begins in one registered range and ends in
    another.
    """
    with in_context_of(device) as bindings:
        bindings.call(
            "cudaHostRegister",
            address,
            nbytes,
            bindings.runtime.cudaHostRegisterPortable,
            nbytes=nbytes,
        )


def unregister(address: int, device: int) -> None:
    """``cudaHostUnregister``: waits for the device. The address is where a registered range
    begins.
    """
    with in_context_of(device) as bindings:
        bindings.call("cudaHostUnregister", address)


def copy_error(code: int) -> RuntimeError:
    """Return the exception for an error of the driver's copies."""
    bindings, call = require(), "cuMemcpyHtoDAsync"
    return RuntimeError(f"{call} {bindings.describe(call, bindings.driver.CUresult(code))[1]}")


def make_current(index: int) -> None:
    """``cudaSetDevice``: make a device current in this thread, for the driver too."""
    require().call("cudaSetDevice", index)
