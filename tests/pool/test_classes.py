"""Size classes, and which slab serves a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinstage._sizes import (
    REUSE_FACTOR,
    SMALL_SLAB_BYTES,
    reuse_limit,
    size_class,
)

sizes = st.integers(1, 2**40) | st.integers(0, 40).flatmap(
    lambda power: st.integers(-2, 2).map(lambda d: 2**power + d)
)
sizes = sizes.filter(lambda nbytes: nbytes >= 1)
units = st.sampled_from([1, 2, 512, 4096, 65536, 2 << 20])


@given(sizes, sizes)
def test_a_larger_request_never_has_a_smaller_class(one, other):
    small, large = sorted([one, other])
    assert size_class(small) <= size_class(large)


@given(sizes, units)
def test_a_class_is_a_class_of_its_own(nbytes, granularity):
    assert size_class(size_class(nbytes, granularity), granularity) == size_class(
        nbytes, granularity
    )


@given(sizes, units)
def test_classes_are_whole_units_with_bounded_waste(nbytes, granularity):
    capacity = size_class(nbytes, granularity)
    assert capacity % granularity == 0
    assert capacity >= nbytes
    assert capacity - nbytes < granularity or capacity <= nbytes * 1.125


@given(st.integers(1, SMALL_SLAB_BYTES // 2))
def test_small_slabs_waste_at_most_an_eighth(nbytes):
    limit = reuse_limit(nbytes, size_class(nbytes))
    assert size_class(nbytes) <= limit
    assert (limit - nbytes) / limit <= 1 / 8


@given(st.integers(SMALL_SLAB_BYTES, 2**40))
def test_large_slabs_serve_up_to_twice_the_class(nbytes):
    assert reuse_limit(nbytes, size_class(nbytes)) == REUSE_FACTOR * size_class(nbytes)


@pytest.mark.parametrize("nbytes", [100, 3000, SMALL_SLAB_BYTES, 5 * SMALL_SLAB_BYTES + 1])
def test_idle_slabs_within_the_reuse_limit_serve_first(make_pool, nbytes):
    limit = reuse_limit(nbytes, size_class(nbytes))
    larger = size_class(limit * 15 // 16)
    assert size_class(nbytes) < larger <= limit
    pool = make_pool("64MiB")
    pool.reserve(larger)
    pool.reserve(limit + 1)
    with pool.acquire(nbytes) as within, pool.acquire(nbytes) as new:
        assert (within.capacity, new.capacity) == (larger, size_class(nbytes))


@pytest.mark.parametrize("nbytes", [0, -1, "0B"])
def test_an_empty_lease_is_refused(pool, nbytes):
    with pytest.raises(ValueError, match=r"at least 1|negative"):
        pool.acquire(nbytes)
