"""All probes of private names, for ``pinstage doctor``."""

from __future__ import annotations

from .loader import why_loader_is_unknown
from .probes import Problem
from .storages import why_changes_are_not_seen
from .views import why_tensors_are_slow


def problems() -> list[Problem]:
    """Return the probes that fail."""
    tried = [
        ("tensors", why_tensors_are_slow(), "tensors are described and made in Python, one by one"),
        ("save_on_cpu", why_changes_are_not_seen(), "pinstage.offload.save_on_cpu is refused: use torch's"),
        ("DataLoader", why_loader_is_unknown(), "batches of workers are staged in the main process, which is slower"),
    ]
    return [Problem(name, reason, remedy) for name, reason, remedy in tried if reason is not None]
