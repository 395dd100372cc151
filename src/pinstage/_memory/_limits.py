"""The most that a process may page-lock without hurting its host, and the reason."""

import os
from pathlib import Path

from .. import _host
from .._sizes import format_bytes

SHARE_PERCENT = 25
"""The share of available memory that ``"auto"`` takes. Page-locked memory cannot be swapped or
reclaimed, and the same memory must serve the dataset, the workers and the page cache that feeds
them: a quarter leaves as much for each of them."""

WSL_PINNED_BYTES = 1 << 30
"""WSL2's limit for a process: it refuses more than about 1 GiB, whatever ``ulimit -l`` says
(nvidia-docker#1725).
"""

UNKNOWN_BYTES = 1 << 30
"""Assumed to be available if no limit can be read: enough to stage with, and little on any machine
with a GPU.
"""

_LEAST_BYTES = 1 << 20  # a cap must let something through


def auto_max_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Choose a cap on page-locked bytes, and say why.

    A quarter (``SHARE_PERCENT``) of the smallest of: the memory that the kernel calls available;
    what each cgroup above this process has left (`_host.cgroup_memory`); the limit of WSL2. That is
    divided by the number of ranks on this host: ``LOCAL_WORLD_SIZE``, which torchrun sets, else 1.
    ``RLIMIT_MEMLOCK`` is ignored: NVIDIA's driver doesn't count the pages it pins against it,
    neither on Linux nor under WSL2 (whose default of 64 KiB has no effect).

    Returns:
        The cap in bytes, and the reason, as in ``"25% of 62.80 GiB available (cgroup headroom),
        divided by 2 local ranks"``.

    Raises:
        ValueError: ``LOCAL_WORLD_SIZE`` is not a positive number.
    """
    ranks = _ranks()
    limits = _left(root)
    if _host.is_wsl(root):
        limits.append((WSL_PINNED_BYTES, "limit of WSL2"))
    least, which = min(limits, default=(UNKNOWN_BYTES, "assumed: no limit can be read here"))
    reason = f"{SHARE_PERCENT}% of {format_bytes(max(least, 0))} available ({which})"
    if ranks > 1:
        reason += f", divided by {ranks} local ranks"
    cap = least * SHARE_PERCENT // 100 // ranks
    if cap < _LEAST_BYTES:
        return _LEAST_BYTES, f"{reason}, raised to the least useful {format_bytes(_LEAST_BYTES)}"
    return cap, reason


def most_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return the memory that exists, used or not, and where that limit comes from. More can never
    be page-locked.

    Touching more doesn't fail but ends the process, so callers check first.
    """
    limits = [(group.limit, "limit of this cgroup") for group in _host.cgroup_memory(root)]
    if (total := _host.meminfo("MemTotal", root)) is not None:
        limits.append((total, "memory of this machine"))
    return min(limits, default=(1 << 63, "no limit can be read here"))


def check_is_left(nbytes: int, root: Path = Path("/")) -> None:
    """Check that this much memory is left before it is touched: the kernel ends a process that
    touches more.

    Raises:
        MemoryError: the cgroup or the machine has less left.
    """
    left, whose = min(_left(root), default=(nbytes, ""))
    if nbytes > left:
        raise MemoryError(
            f"{format_bytes(nbytes)} asked, {format_bytes(max(left, 0))} left ({whose}); ask for "
            "less, end other programs, or raise the container's memory limit"
        )


def _left(root: Path) -> list[tuple[int, str]]:
    """Return the bytes that each limit leaves, and where the limit comes from."""
    limits = [(group.left, "cgroup headroom") for group in _host.cgroup_memory(root)]
    if (available := _host.meminfo("MemAvailable", root)) is not None:
        limits.append((available, "memory available on this machine"))
    return limits


def remedy(nbytes: int, root: Path = Path("/")) -> str:
    """Return what to do if the platform refuses to page-lock this many bytes, according to the
    limits.
    """
    if _host.is_wsl(root):
        return (
            f"WSL2 page-locks about {format_bytes(WSL_PINNED_BYTES)} in all: ask for less than that"
        )
    left, whose = min(_left(root), default=(nbytes, ""))
    if left < nbytes:
        return (
            f"{format_bytes(max(left, 0))} left ({whose}): free some, raise the container's limit, "
            "or ask for less"
        )
    if (locked := _host.locked_limit(root)) is not None and locked < nbytes:
        return (
            f"the locked-memory limit is {format_bytes(locked)}: raise it (`ulimit -l`, `--ulimit "
            "memlock=-1`)"
        )
    return "free page-locked memory elsewhere, or ask for less; `pinstage doctor` tries each kind"


def _ranks() -> int:
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            f"LOCAL_WORLD_SIZE must be 1 or more: {given!r}; set it to the number of ranks on this "
            "host, as torchrun does"
        )
    return int(given)
