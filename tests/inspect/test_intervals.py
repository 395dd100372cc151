"""Interval arithmetic agrees with counting single cells of time."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinstage.inspect._trace import _analysis as iv

CELLS = 40
# The machine may be busy.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def spans():
    one = st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(sorted)
    return st.lists(one, max_size=12).map(lambda found: np.array(found, dtype=float).reshape(-1, 2))


def cells(intervals):
    """Return which cells ``[i, i + 1)`` are in any of the intervals."""
    taken = np.zeros(CELLS, dtype=bool)
    for start, end in intervals:
        taken[int(start) : int(end)] = True
    return taken


def is_a_set(intervals):
    flat = intervals.ravel()
    return bool((np.diff(flat) > 0).all())


@unhurried
@given(spans(), spans())
def test_a_union_is_complete_sorted_and_disjoint(one, other):
    merged = iv.union(one, other)
    assert is_a_set(merged)
    assert (cells(merged) == (cells(one) | cells(other))).all()


@unhurried
@given(spans(), spans())
def test_subtraction_agrees_with_counting(one, other):
    a, b = iv.union(one), iv.union(other)
    assert is_a_set(iv.subtract(a, b))
    assert (cells(iv.subtract(a, b)) == (cells(a) & ~cells(b))).all()
    assert iv.total(iv.subtract(a, b)) == (cells(a) & ~cells(b)).sum()


@unhurried
@given(spans(), st.integers(0, CELLS), st.integers(0, CELLS))
def test_what_lies_within_a_window_agrees_with_counting(one, left, right):
    start, end = sorted((left, right))
    assert iv.within(iv.union(one), start, end) == cells(one)[start:end].sum()


@unhurried
@given(spans(), st.lists(st.integers(0, CELLS), min_size=1))
def test_the_interval_that_holds_a_time_is_found(one, times):
    merged = iv.union(one)
    found = iv.containing(merged, times)
    for time, index in zip(times, found, strict=True):
        holding = [i for i, (start, end) in enumerate(merged) if start <= time <= end]
        assert (index in holding) if holding else index == -1


def test_nothing_has_no_length_and_no_window():
    assert iv.total(iv.union()) == 0
    assert iv.within(iv.EMPTY, [0.0, 1.0], [2.0, 3.0]).tolist() == [0, 0]
    assert iv.containing(iv.EMPTY, [1.0]).tolist() == [-1]
