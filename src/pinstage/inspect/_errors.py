"""What can go wrong while looking, as types that know the exit status of the command."""

from __future__ import annotations

import pinstage as ps


class InspectError(ps.errors.StagingError):
    """A reason to stop that the command shows as one message, without a traceback."""

    exit_status = 2


class TargetError(InspectError, ImportError):
    """The ``module:callable`` of ``pinstage audit`` cannot be found or called, or gives no batch."""


class TraceError(InspectError, ValueError):
    """A file is not a trace of the PyTorch profiler, is broken, or holds nothing to report."""
