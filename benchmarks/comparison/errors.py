"""The error for problems before the first measurement."""

from __future__ import annotations


class BenchError(Exception):
    """A reason to stop that is shown as one message, without a traceback."""
