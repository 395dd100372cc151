"""Arithmetic of time intervals, on arrays.

A set of intervals is a float64 array of shape ``[n, 2]``, start and end in seconds, sorted and disjoint: what `union`
returns, and what every function here takes and gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.float64]

EMPTY: Intervals = np.empty((0, 2))
ALWAYS: Intervals = np.array([[-np.inf, np.inf]])


def union(*parts: npt.ArrayLike, gap: float = 0.0) -> Intervals:
    """Merge any intervals, ``[n, 2]`` each, into a set; those at most `gap` apart become one, empty ones vanish."""
    spans = np.concatenate([np.asarray(part, dtype=np.float64).reshape(-1, 2) for part in parts] or [EMPTY])
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate([[True], spans[1:, 0] > reach[:-1] + gap])
    ends = np.concatenate([begins[1:], [True]])
    return np.column_stack([spans[begins, 0], reach[ends]])


def total(spans: Intervals) -> float:
    """Return the length of a set."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return what is in both sets."""
    return subtract(one, subtract(one, other))


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return what is in one set and not in the other."""
    if not len(one) or not len(other):
        return one
    edges = np.concatenate([one.ravel(), other.ravel()])
    steps = np.concatenate([np.tile([1, -1], len(one)), np.tile([-2, 2], len(other))])
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(steps[order])
    # 1: in one only; -1: in both; -2: in the other only.
    kept = np.flatnonzero(depth[:-1] == 1)
    return union(np.column_stack([edges[kept], edges[kept + 1]]))


def within(spans: Intervals, start: npt.ArrayLike, end: npt.ArrayLike) -> Times:
    """Return how much of a set lies between each `start` and `end`."""
    start, end = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    if not len(spans):
        return np.zeros(start.shape)
    lengths = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    before = np.column_stack([lengths[:-1], lengths[1:]]).ravel()  # each edge, linear between them
    found: Times = np.interp(end, spans.ravel(), before) - np.interp(start, spans.ravel(), before)
    return found


def containing(spans: Intervals, times: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Return the index of the interval that each time is in, ends included; -1 where there is none."""
    times = np.asarray(times, dtype=np.float64)
    if not len(spans):
        return np.full(times.shape, -1, dtype=np.intp)
    index: npt.NDArray[Any] = np.searchsorted(spans[:, 0], times, side="right") - 1
    return np.where((index >= 0) & (times <= spans[np.maximum(index, 0), 1]), index, -1)
