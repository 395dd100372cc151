"""Runs other programs to their end."""

import subprocess


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
