"""What can go wrong before anything is measured, as a type."""

from __future__ import annotations


class BenchError(Exception):
    """A reason to stop that is shown as one message, without a traceback."""
