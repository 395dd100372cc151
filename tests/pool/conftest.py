"""Requests that wait."""

import pytest
from doubles import wait_for_waiters


@pytest.fixture
def waiting(background):
    """Let another thread acquire a slab; return its future once the request waits."""

    def acquire(pool, *args, **options):
        waits = pool.stats().waits
        future = background(pool.acquire, *args, **options)
        wait_for_waiters(pool, waits + 1)
        return future

    return acquire
