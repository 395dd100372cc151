"""Runs other programs."""

import os
import pty
import subprocess
from contextlib import contextmanager


def completed(command, **options):
    """Run a command; return its status and, as text, its output. Options are those of
    `subprocess.run`.
    """
    options = {"capture_output": True, "text": True} | options
    return subprocess.run([*map(str, command)], check=False, **options)


def output_of(command, **options):
    """Run a command and return what it printed; fail with its output if it failed."""
    done = completed(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def terminal(command, **environment):
    """Run a command in a terminal; give what reads the terminal, and the process."""
    main, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"} | environment
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    with subprocess.Popen(command, env=environment, **streams) as process:
        os.close(child)
        try:
            yield main, process
        finally:
            process.kill()
    os.close(main)
