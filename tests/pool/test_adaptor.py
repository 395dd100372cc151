"""A pool over memory that may refuse for a while, whatever the reason."""

import ast
import time
from pathlib import Path

import pytest
from doubles import CountingMemory, outcome, stays_blocked, wait_until

from pinstage import SlabPool, _pool
from pinstage._pool._adaptor import RefusedForNow, ResourceAdaptor
from pinstage.errors import AcquireTimeoutError, BudgetExceededError


class Rationed(ResourceAdaptor):
    """Allows some bytes, of which the test may grant more."""

    def __init__(self, resource, granted):
        super().__init__(resource)
        self.granted, self.held, self.looks, self.ended = granted, 0, 0, 0

    def allocate(self, nbytes, count, deadline):
        if self.held + nbytes * count > self.granted:
            self.allowed = self.granted
            raise RefusedForNow
        self.held += nbytes * count
        return super().allocate(nbytes, count, deadline)

    def deallocate(self, block):
        super().deallocate(block)
        self.held -= block.nbytes

    def is_due(self):
        return self.allowed < self.granted

    def look(self):
        self.looks += self.is_due()
        self.allowed = self.granted

    def holders(self):
        return ", rationed"

    def cap(self, nbytes):
        return f"ration={nbytes}"

    def end(self):
        self.ended += 1


@pytest.fixture
def adaptor(monkeypatch):
    made = Rationed(CountingMemory(), 100)
    monkeypatch.setattr("pinstage._pool._pool.adaptor_for", lambda *_: made)
    return made


@pytest.fixture
def pool(adaptor):
    with SlabPool(1000) as pool:
        yield pool
    assert adaptor.ended
    assert adaptor.held == 0


def test_a_refused_request_waits_until_more_is_allowed(pool, adaptor, background):
    with pool.acquire(64):
        waiting = background(pool.acquire, 64)
        wait_until(lambda: pool.stats().waits == 1)
        assert stays_blocked(waiting)
        adaptor.granted = 128
        outcome(waiting).release()
        assert adaptor.looks == 1


def test_a_refused_request_takes_what_is_released(pool, background):
    lease = pool.acquire(64)
    waiting = background(pool.acquire, 64)
    wait_until(lambda: pool.stats().waits == 1)
    lease.release()
    outcome(waiting).release()


def test_idle_slabs_make_room_within_what_is_allowed(pool):
    pool.acquire(48).release()
    with pool.acquire(40), pool.acquire(56, timeout=0):  # 48 are freed
        assert pool.stats().trims == 1


def test_a_refused_request_times_out_with_the_reason(pool):
    with pool.acquire(64):
        began = time.monotonic()
        with pytest.raises(
            AcquireTimeoutError, match=r"\(given: 1000, rationed\).*or pass ration="
        ):
            pool.acquire(64, timeout=0.1)
        assert time.monotonic() - began < 1
        with pytest.raises(BudgetExceededError, match="ration="):
            pool.reserve(64, count=2)


def test_an_own_cap_that_is_tighter_is_named(pool, adaptor):
    adaptor.granted = 5000
    with pytest.raises(BudgetExceededError, match="pass max_bytes="):
        pool.acquire(2000)


def test_the_pool_knows_no_budget_beyond_its_arguments():
    folder = Path(_pool.__file__).parent
    for name in ("_state", "_growth", "_slab", "_lease", "_waiting", "_adaptor"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not modules & {"_host_budget", "_rows"}, name
