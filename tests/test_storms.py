"""Interrupts, collections and kills wherever they can come: nothing hangs, and all slabs come back."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).with_name("storm.py")


def storm(*arguments):
    """Run a storm in a process whose parent ignores SIGINT; return what it printed, and what to the screen."""

    def ignore_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = [sys.executable, "-X", "faulthandler", STORM, *map(str, arguments)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=ignore_interrupts,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("what", ["pool", "stager", "ring", "to_host", "loader"])
def test_after_interrupts_of_the_main_thread_all_is_back_and_nothing_was_printed(what):
    found, told = storm(what, 150)
    assert found["interrupted"] > 100
    assert (found["wrong"], told) == ([], "")


@pytest.mark.parametrize("what", ["pool", "stager", "ring", "to_host", "loader"])
def test_after_interrupts_of_other_threads_all_is_back(what):
    found, _ = storm(what, 50, "threads")
    assert found["interrupted"] >= 50
    assert found["wrong"] == []
