"""Errors of the demo, with the exit status of the program."""

from __future__ import annotations

REMEDY = "pip install -e . --group demo"


class DemoError(Exception):
    """A reason to stop that is shown as one message, without a traceback."""

    exit_status = 2


class LossMismatchError(DemoError):
    """Two ways of staging the same batches trained to different losses."""

    exit_status = 1
