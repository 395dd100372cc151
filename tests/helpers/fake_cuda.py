"""A double of cuda-python, which counts live allocations and fails on request."""

# ruff: noqa: N802, N815 (the double has cuda-python's names)

import mmap
import types

from doubles import is_mapped

from pinstage._memory import _pages as pages

NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    4: "cudaErrorCudartUnloading",
    208: "cudaErrorAlreadyMapped",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
}


class FakeCuda:
    """Both modules of cuda-python. Like them, it returns a tuple of the code and the results."""

    cudaHostAllocPortable = cudaHostRegisterPortable = 1
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyHostToDevice=1)

    def __init__(self):
        self.calls = []
        self.registered = {}
        self.allocated = {}
        self.context_stack = []
        self.contexts = []
        self.last_error = 0
        self.coming = {}  # by name of a call: the codes of the next
        self.offset = 0
        self.most_registered = None  # larger calls are refused with 801
        self.before = {}  # by name of a call: a function to run before it
        self.attributes = {
            "HOST_NUMA_ID": -1,
            "HOST_REGISTER_SUPPORTED": 1,
            "PAGEABLE_MEMORY_ACCESS": 0,
            "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 0,
        }
        prefix = "CU_DEVICE_ATTRIBUTE_"
        self.CUdevice_attribute = types.SimpleNamespace(
            **{prefix + name: name for name in self.attributes}
        )

    def fail(self, call, code, *, nth=1):
        """Make the ``nth`` next call of that name return ``code``."""
        self.coming[call] = [0] * (nth - 1) + [code]

    def refuse(self, call, code, times):
        """Make the next ``times`` calls of that name return ``code``; return how many of the last
        request were left.
        """
        left = len(self.coming.get(call, ()))
        self.coming[call] = [code] * times
        return left

    def _code(self, call, *args):
        self.calls.append((call, *args))
        coming = self.coming.get(call)
        code = coming.pop(0) if coming else 0
        if code and call.startswith("cuda"):  # the driver doesn't keep errors
            self.last_error = code
        return code

    # the driver's

    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return self._code("cuThreadExchangeStreamCaptureMode", mode), 0

    def cuDeviceGetPCIBusId(self, nbytes, device):
        return self._code("cuDeviceGetPCIBusId", device), b"0000:1b:00.0".ljust(nbytes, b"\0")

    def cuDeviceGet(self, index):
        return self._code("cuDeviceGet", index), f"device {index}"

    def cuDeviceGetAttribute(self, attribute, device):
        return self._code("cuDeviceGetAttribute", attribute), self.attributes[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        self.contexts.append(device)
        return self._code("cuDevicePrimaryCtxRetain", device), f"context of {device}"

    def cuDevicePrimaryCtxGetState(self, device):
        return self._code("cuDevicePrimaryCtxGetState", device), 0, int(device in self.contexts)

    def cuCtxPushCurrent(self, context):
        code = self._code("cuCtxPushCurrent", context)
        if not code:
            self.context_stack.append(context)
        return (code,)

    def cuCtxPopCurrent(self):
        return self._code("cuCtxPopCurrent"), self.context_stack.pop()

    # the runtime's

    def cudaHostAlloc(self, nbytes, flags):
        code = self._code("cudaHostAlloc", nbytes, flags)
        if code:
            return code, None
        assert self.context_stack
        address = pages.map_pages(pages.round_up(nbytes + self.offset, mmap.PAGESIZE)) + self.offset
        self.allocated[address] = nbytes
        return code, address

    def cudaFreeHost(self, address):
        code = self._code("cudaFreeHost", address)
        if not code:
            assert self.context_stack
            pages.unmap(address - self.offset, self.allocated.pop(address))
        return (code,)

    def cudaHostRegister(self, address, nbytes, flags):
        self.before.get("cudaHostRegister", int)()
        code = self._code("cudaHostRegister", address, nbytes, flags)
        if self.most_registered is not None and nbytes > self.most_registered:
            code = self.last_error = 801
        if not code:
            assert self.context_stack
            assert is_mapped(address)
            self.registered[address] = nbytes
        return (code,)

    def cudaHostUnregister(self, address):
        code = self._code("cudaHostUnregister", address)
        assert is_mapped(address), "unmapped before it was unregistered"
        if not code:
            assert self.context_stack
            del self.registered[address]
        return (code,)

    def cudaGetLastError(self):
        self.calls.append(("cudaGetLastError",))
        code, self.last_error = self.last_error, 0
        return (code,)

    def cudaGetErrorName(self, code):
        return 0, NAMES[code].encode()

    def cudaGetErrorString(self, code):
        return 0, f"text {code}".encode()

    cuGetErrorName, cuGetErrorString = cudaGetErrorName, cudaGetErrorString

    def names(self):
        return [
            call[0]
            for call in self.calls
            if call[0].startswith("cudaHost") or call[0] == "cudaFreeHost"
        ]
