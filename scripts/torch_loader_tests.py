"""Run torch's own tests of its loader against `pinstage.DataLoader`.

    python scripts/torch_loader_tests.py CHECKOUT [--slow] [--torch] [pytest's arguments]

CHECKOUT is a checkout of https://github.com/pytorch/data (BSD-3-Clause): torch's package doesn't
contain its tests, and torchdata's repository has a copy of them for its own loader class. This
script replaces that class by `pinstage.DataLoader`, on the CPU. It fetches nothing, and writes
nothing into the checkout. The tests import expecttest, psutil and dill.

Each failing test must be in `EXPECTED`, with the reason, and each test in it must fail; anything
else is a new difference. ``--torch`` tests torch's own loader in the same way, to show what fails
for other reasons.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

TESTS = "test/stateful_dataloader/test_dataloader.py"

STAND_IN = """
import torch
import pinstage


class StatefulDataLoader({base}[torch.utils.data.dataloader._T_co]):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{options}, **kwargs)
"""
"""The package torchdata, as the tests see it."""

OURS = {"base": "pinstage.DataLoader", "options": {"device": "cpu"}}
TORCHS = {"base": "torch.utils.data.DataLoader", "options": {}}

EXPECTED: dict[str, str] = {}
"""Tests that fail with `pinstage.DataLoader`, as patterns, and why. With torch 2.13 there are
none.
"""

EXPECTED_OF_TORCH = {
    "*.test_get_worker_info": (
        "torch's WorkerInfo is a frozen dataclass by now, whose error is no RuntimeError"
    ),
}
"""Tests that fail with torch's own loader too, as patterns, and why."""


def main() -> int:
    """Run them; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Run torch's own tests of its loader against pinstage.DataLoader."
    )
    parser.add_argument("checkout", type=Path, help="checkout of https://github.com/pytorch/data")
    parser.add_argument(
        "--slow", action="store_true", help="also run tests that torch marks as slow"
    )
    parser.add_argument("--torch", action="store_true", help="test torch's own loader instead")
    options, more = parser.parse_known_args()
    tests = options.checkout.resolve() / TESTS
    if not tests.is_file():
        parser.error(f"there is no {tests}; pass a checkout of https://github.com/pytorch/data")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(
            tests,
            Path(folder),
            slow=options.slow,
            loader=TORCHS if options.torch else OURS,
            more=more,
        )
    return report(outcomes, EXPECTED_OF_TORCH if options.torch else EXPECTED_OF_TORCH | EXPECTED)


def run(
    tests: Path, folder: Path, *, slow: bool, loader: dict[str, object], more: list[str]
) -> dict[str, str]:
    """Run the tests; return the outcome of each."""
    package = folder / "torchdata" / "stateful_dataloader"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN.format_map(loader))
    (folder / "pytest.ini").write_text("[pytest]\n")  # overrides the checkout's own
    found = folder / "outcomes.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-c",
        folder / "pytest.ini",
    ]
    command += ["--timeout=600", f"--junitxml={found}", *more, tests]
    # Processes that the tests start import the package, too.
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if slow:
        environment["PYTORCH_TEST_WITH_SLOW"] = "1"
    status = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
    if status not in (0, 1):
        raise SystemExit(f"pytest ended with status {status}")
    return {
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": outcome_of(case)
        for case in ET.parse(found).iter("testcase")
    }


def outcome_of(case: ET.Element) -> str:
    """Return the outcome of a test."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return f"{kind}: {found.get('message', '').splitlines()[0]}"
    return "passed"


def report(outcomes: dict[str, str], expected: dict[str, str]) -> int:
    """Print the differences from the expected outcomes."""
    failed = {
        test: text for test, text in outcomes.items() if not text.startswith(("passed", "skipped"))
    }
    unknown = {
        test: text
        for test, text in failed.items()
        if not any(fnmatch.fnmatch(test, name) for name in expected)
    }
    gone = [
        name
        for name in expected
        for test in fnmatch.filter(outcomes, name)
        if outcomes[test] == "passed"
    ]
    for test, text in unknown.items():
        print(f"UNEXPECTED {test}: {text}")  # noqa: T201
    for name in gone:
        print(f"NO LONGER FAILS {name}")  # noqa: T201
    for name, reason in expected.items():
        print(f"expected: {len(fnmatch.filter(failed, name))} failed: {name}: {reason}")  # noqa: T201
    passed = sum(text == "passed" for text in outcomes.values())
    skipped = len(outcomes) - passed - len(failed)
    print(f"{passed} passed, {skipped} skipped, {len(failed)} failed, {len(unknown)} unexpectedly")  # noqa: T201
    return 1 if unknown or gone else 0


if __name__ == "__main__":
    sys.exit(main())
