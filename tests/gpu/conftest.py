"""What a GPU test needs: a device, or a clear word that there is none, and a latch that makes races deterministic."""

import os
from collections.abc import Iterator

import pytest
import torch
from latch import Latch


def _need(devices: int) -> None:
    """Skip the test where there are fewer devices; fail it where PINSTAGE_REQUIRE_GPU says that there are as many."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= devices:
        return
    required = os.environ.get("PINSTAGE_REQUIRE_GPU", "0")
    sees = f"torch sees {found} CUDA devices" if found else "torch sees no CUDA device"
    if int(required) >= devices:
        pytest.fail(f"PINSTAGE_REQUIRE_GPU={required} and {sees}")
    pytest.skip(sees if devices == 1 else f"{sees}; this needs {devices}")


@pytest.fixture
def cuda_device() -> torch.device:
    """The first CUDA device; without one the test is skipped, or fails where PINSTAGE_REQUIRE_GPU=1."""
    _need(1)
    torch.cuda.init()
    return torch.device("cuda", 0)


@pytest.fixture
def two_devices() -> tuple[torch.device, torch.device]:
    """The first two CUDA devices; without them the test is skipped, or fails where PINSTAGE_REQUIRE_GPU=2."""
    _need(2)
    torch.cuda.init()
    return torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def latch(cuda_device: torch.device) -> Iterator[Latch]:
    """A latch that is open, at the latest, when the test ends."""
    latch = Latch(cuda_device)
    yield latch
    latch.open()
    torch.cuda.synchronize(cuda_device)
