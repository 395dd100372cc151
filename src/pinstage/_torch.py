"""Private names of torch, CPython and optree: all that pinstage uses, each behind a probe of what it does."""

from __future__ import annotations

import threading


def owns(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Say whether this thread has a lock. `threading.Condition` asks in this way; there is no public one."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]
