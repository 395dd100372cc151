"""Errors of benchmarks."""

from __future__ import annotations


class BenchError(Exception):
    """A problem before the first measurement: one message, without a traceback."""


class Incorrect(Exception):  # noqa: N818 - the status of a row, and not of a program
    """A way's result isn't bit for bit the expected one."""
