"""Shared parts of all probes of private names: the errors they expect, and their messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..errors import StagingWarning

WRONG = (AttributeError, ImportError, TypeError, ValueError, IndexError, RuntimeError, OSError)
"""Errors of a private name that is gone, or no longer does what it did."""

_warned: set[str] = set()


def warn_once(text: str, *, about: str | None = None, stacklevel: int = 3) -> None:
    """Warn, once per process, that something works more slowly.

    Args:
        text: the warning.
        about: its subject, of which there is one warning; None is the text.
        stacklevel: as for `warnings.warn`; 3 is the caller's caller.
    """
    subject = about or text
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(text, StagingWarning, stacklevel=stacklevel)


def why_not(works: Callable[[], bool], what: str) -> str | None:
    """Return the reason why private names aren't used, unless a probe says that they work."""
    try:
        is_fine = works()
    except WRONG:
        is_fine = False
    return None if is_fine else in_this_torch(what)


def in_this_torch(what: str) -> str:
    """Return the reason why a private name isn't used."""
    return f"torch {torch.__version__} {what}"
