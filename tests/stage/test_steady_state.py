"""A long run holds no more memory at its end than after its warm-up."""

import pytest
from steady import long_run

MIB = 1 << 20


@pytest.mark.usefixtures("slabs_for_all")
def test_random_batches_allocate_nothing_and_leave_nothing():
    before, after = long_run("cpu", 10_000)
    assert after.pool.misses == before.pool.misses
    assert after.pool.total_held_slabs == before.pool.total_held_slabs
    assert after.pool.held_bytes == before.pool.held_bytes
    assert after.pool.waits == before.pool.waits
    assert after.pool.hits - before.pool.hits == 10_000
    assert after.pool.leased_bytes == 0
    assert after.resident_bytes - before.resident_bytes < 16 * MIB
