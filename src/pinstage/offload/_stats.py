"""What was saved, where it went, and how it came back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """What `save_on_cpu` has done so far: the answer of its `stats()`, a snapshot."""

    copies: int = 0
    """Copies to the host."""
    copied_bytes: int = 0
    """Their bytes."""
    shared: int = 0
    """Tensors whose bytes had gone with another that has the same memory."""
    stayed: int = 0
    """Tensors that stayed on the device because of what they are: parameters and views of them, small ones, those that
    `keep` names, and kinds that have no plain memory (sparse, subclasses)."""
    stayed_at_cap: int = 0
    """Tensors that stayed because the pool had no room."""
    stayed_at_cap_bytes: int = 0
    """Their bytes."""
    still_there: int = 0
    """Times that backward asked for a tensor whose memory on the device had not been let go of yet."""
    ahead: int = 0
    """Times that it asked for one that had set out before."""
    late: int = 0
    """Times that it asked for one that set out only then."""
