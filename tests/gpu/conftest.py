"""Fixtures for GPU tests: a device, or a clear message without one, and a latch that makes races
deterministic.
"""

import gc
import os
import weakref

import numpy as np
import pytest
import torch
from doubles import wait_until
from latch import Latch

import pinstage as ps
from pinstage._reaper import reaper
from pinstage._region._chunks import Chunks


def pytest_runtest_setup(item):
    """Skip a test for which there are too few devices; fail it if PINSTAGE_REQUIRE_GPU asks for as
    many. Here and not in the fixtures, so that pytest prints one line for all skipped tests.
    """
    needs = 2 if "two_devices" in item.fixturenames else int("cuda_device" in item.fixturenames)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= needs:
        return
    required = os.environ.get("PINSTAGE_REQUIRE_GPU", "0")
    sees = f"torch sees {found} CUDA devices, not 2" if found else "torch sees no CUDA device"
    if int(required) >= needs:
        pytest.fail(f"PINSTAGE_REQUIRE_GPU={required} and {sees}")
    pytest.skip(sees)


@pytest.fixture
def cuda_device():
    """The first CUDA device; see `pytest_runtest_setup`."""
    torch.cuda.init()
    yield torch.device("cuda", 0)
    _wait_until_all_is_freed()


@pytest.fixture
def two_devices():
    """The first two CUDA devices; see `pytest_runtest_setup`."""
    torch.cuda.init()
    yield torch.device("cuda", 0), torch.device("cuda", 1)
    _wait_until_all_is_freed()


def _wait_until_all_is_freed():
    """Wait for threads that free page-locked memory: freeing would hang while the next test holds a
    stream.
    """
    gc.collect()
    last = np.empty(0)
    is_there = weakref.ref(last)
    reaper.bury(last)  # after all earlier tasks
    reaper.start()
    del last
    wait_until(lambda: is_there() is None)
    wait_until(
        lambda: not any(type(thing) is Chunks and thing._stops for thing in gc.get_objects())
    )


@pytest.fixture
def latch(cuda_device):
    """A latch that opens at the end of the test at the latest."""
    latch = Latch(cuda_device)
    yield latch
    latch.open()
    torch.cuda.synchronize(cuda_device)


@pytest.fixture
def stager(cuda_device, latch):
    """A stager to the device. The latch opens before it closes, since that would wait for held
    streams.
    """
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        yield stager


@pytest.fixture
def borrowing(cuda_device, latch):
    """As `stager`, but page-locked leaves are not packed."""
    with ps.Stager(cuda_device, max_bytes="64MiB", borrow_pinned=True) as stager, latch:
        yield stager
