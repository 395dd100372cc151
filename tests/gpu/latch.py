"""Holds a CUDA stream until the test opens the latch: later work on the stream can't start before.

Two operations wait for the whole device, and so forever while a stream is held: freeing page-locked
memory, and the first use of a kernel. So a test opens the latch before it closes a pool, and uses
its kernels once beforehand.
"""

import torch
from cuda.bindings import driver


class Latch:
    """A word in page-locked memory that streams wait for."""

    def __init__(self, device):
        torch.zeros(1, device=device)  # a context
        self._device = device
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()

    def hold(self, stream):
        """Keep later work on the stream from starting before `open`."""
        with torch.cuda.device(self._device):
            (result,) = driver.cuStreamWaitValue32(
                stream.cuda_stream,
                self._word.data_ptr(),
                1,
                driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ,
            )
        assert result == driver.CUresult.CUDA_SUCCESS, result

    def open(self):
        """Let the held streams continue."""
        self._word[0] = 1

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.open()
