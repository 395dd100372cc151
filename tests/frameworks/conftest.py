"""The tests with frameworks: `make test-frameworks` runs them, in an environment that has them all. None is skipped."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)  # those of the frameworks are theirs
            item.add_marker(pytest.mark.filterwarnings("error:.*(pinstage|ps\\.)"), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and Path(__file__).parent in item.path.parents:
        report.outcome = "failed"
        report.longrepr = f"skipped, and nothing may be skipped here: {report.longrepr}"
    return report
