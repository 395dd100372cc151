"""Sets of times agree with counting single moments."""

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinstage.inspect._trace import _analysis
from pinstage.inspect._trace._analysis import Timeline

LENGTH = 40


def intervals():
    one = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
    lists = st.lists(one, max_size=12)
    return lists.map(lambda pairs: np.array(pairs, dtype=float).reshape(-1, 2))


def timeline_of(*moments):
    return Timeline(np.concatenate([np.ravel(some) for some in (*moments, [0.0, LENGTH])]))


def counted(pairs):
    """Return which moments ``[i, i + 1)`` are in any of the intervals."""
    taken = np.zeros(LENGTH, dtype=bool)
    for start, end in pairs:
        taken[int(start) : int(end)] = True
    return taken


def spread(timeline, cells):
    """Return the same for a set of a timeline."""
    assert not cells[-1]
    return counted(np.column_stack([timeline.edges, timeline.edges + timeline.lengths])[cells])


@given(intervals(), st.lists(st.integers(0, LENGTH - 1), min_size=1))
def test_the_runs_that_contain_a_moment_are_kept(one, moments):
    timeline = timeline_of(one, moments)
    runs = spread(timeline, timeline.runs_at(timeline.cover(one), moments))
    expected = counted(one)
    for _, run in groupby(range(LENGTH), counted(one).__getitem__):
        cells = list(run)
        if not set(cells) & set(moments):
            expected[cells] = False
    assert (runs == expected).all()


@given(intervals())
@example(np.array([[0.0, 1.0], [4.0, 5.0]]))
def test_short_gaps_are_filled(one):
    timeline = timeline_of(one)
    expected = counted(one)
    for start, end in pairwise(np.flatnonzero(expected)):
        if end - start - 1 <= 3:
            expected[start:end] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_analysis, "_GAP", 3)
        bridged = timeline.bridge(timeline.cover(one))
    assert (spread(timeline, bridged) == expected).all()
