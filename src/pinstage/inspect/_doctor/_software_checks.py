"""Checks of pinstage's extension, and of what it needs of torch, CPython and optree. Pure: findings in, checks out."""

from __future__ import annotations

from ..._torch import Problem
from ._check import Check


def extension(why_not: str | None) -> Check:
    """Look at whether batches are described and packed in C.

    Args:
        why_not: as `pinstage._native.why_not`; what is behind its first semicolon says what to do.
    """
    name = "extension"
    if why_not is None:
        return Check(name, "ok", "batches are described and packed in C")
    found, _, remedy = why_not.partition("; ")
    found = f"not in use, so batches are described and packed in Python, by one thread: {found}"
    if "PINSTAGE_NATIVE" in why_not and not remedy:
        return Check(name, "info", found)
    return Check(name, "warning", found, remedy or "install a pinstage and a torch that go together")


def private_names(problems: list[Problem]) -> list[Check]:
    """Say which private names of torch, CPython and optree do something else than pinstage expects."""
    if not problems:
        return [Check("private names", "ok", "those of torch, CPython and optree do what is expected")]
    return [Check(problem.name, "warning", problem.reason, problem.remedy) for problem in problems]
