"""The tests with frameworks: `make test-frameworks` runs them in an environment with all
frameworks.

Only tests that need a CUDA device are skipped, on a machine without one.
"""

import os
import sys
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # Warnings of the frameworks are their own. The last matching filter counts.
            item.add_marker(
                pytest.mark.filterwarnings("ignore", "error:.*(pinstage|ps\\.)"), append=False
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    is_ours = Path(__file__).parent in item.path.parents
    if report.skipped and is_ours and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, and nothing may be skipped here: {report.longrepr}"
    return report


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device; without such a GPU the test is skipped, or fails where PINSTAGE_REQUIRE_GPU says
    so.
    """
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        is_required = int(os.environ.get("PINSTAGE_REQUIRE_GPU", "0"))
        (pytest.fail if is_required else pytest.skip)("torch sees no CUDA device")
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def workers(request):
    return request.param


@pytest.fixture(autouse=True)
def no_accelerator():
    """Hide the accelerators of other tests, which Accelerate keeps in classes."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        state.PartialState._reset_state()
