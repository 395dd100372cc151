"""What a GPU test needs: a device, or a clear word that there is none, and a latch that makes races deterministic."""

import os
from collections.abc import Iterator

import pytest
import torch
from latch import Latch


@pytest.fixture
def cuda_device() -> torch.device:
    """The first CUDA device; without one the test is skipped, or fails where PINSTAGE_REQUIRE_GPU=1."""
    if not torch.cuda.is_available():
        if os.environ.get("PINSTAGE_REQUIRE_GPU") == "1":
            pytest.fail("PINSTAGE_REQUIRE_GPU=1 and torch sees no CUDA device")
        pytest.skip("torch sees no CUDA device")
    torch.cuda.init()
    return torch.device("cuda", 0)


@pytest.fixture
def latch(cuda_device: torch.device) -> Iterator[Latch]:
    """A latch that is open, at the latest, when the test ends."""
    latch = Latch(cuda_device)
    yield latch
    latch.open()
    torch.cuda.synchronize(cuda_device)
