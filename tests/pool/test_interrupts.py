"""KeyboardInterrupt at every possible point of the pool: no slab, and no byte of the cap, is
lost.
"""

import pytest
from doubles import PATIENCE_SECONDS, ManualEvent, PinnedMemory, interrupts, wait_until

from pinstage import SlabPool
from pinstage.errors import BudgetExceededError

FILES = (
    "_pool.py",
    "_growth.py",
    "_waiting.py",
    "_slab.py",
    "_reaper.py",
)

# About the lease that was never returned to the caller.
pytestmark = pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")


CALLS = {
    "acquire": lambda pool: pool.acquire(100).release(),
    "acquire, which grows": lambda pool: pool.acquire(500).release(),
    "acquire, which trims": lambda pool: pool.acquire(900).release(),
    "a view": lambda pool: pool.acquire(100).tensor(),
    "reserve": lambda pool: pool.reserve(300, count=2),
    "reserve in the background": lambda pool: pool.reserve(
        300, count=2, background=True
    ).synchronize(),
    "trim": SlabPool.trim,
    "stats": SlabPool.stats,
    "close": SlabPool.close,
}


@pytest.mark.parametrize("what", CALLS)
def test_the_whole_cap_is_leasable_after_an_interrupt(memory, what):
    for during in interrupts(*FILES, at_least=6):
        pool = SlabPool(1000, memory=memory)
        pool.reserve(100, count=2)
        during(lambda pool=pool: CALLS[what](pool))
        if not pool.closed:
            with pool.acquire(1000, timeout=PATIENCE_SECONDS) as lease:
                assert lease.capacity == memory.live_bytes == 1000
            stats = pool.stats()
            assert (stats.leased_slabs, stats.in_flight_slabs, stats.free_slabs) == (0, 0, 1)
            assert stats.held_bytes == stats.free_bytes == 1000
        pool.close()
        wait_until(lambda: memory.live_bytes == 0)


def test_an_interrupted_release_waits_or_did_nothing(memory):
    for during in interrupts(*FILES):  # there may be no such point if only C is called
        event = ManualEvent()
        with SlabPool(1000, memory=memory) as pool:
            lease = pool.acquire(1000)
            during(lambda lease=lease, event=event: lease.release(after=event))
            if lease.released:
                assert pool.stats().in_flight_slabs == 1
            else:
                lease.release(after=event)
            event.finish()
            pool.acquire(1000, timeout=0).release()


def test_an_interrupted_block_end_waits_for_its_work(monkeypatch):
    for during in interrupts(*FILES, at_least=3):
        event = ManualEvent()
        monkeypatch.setattr(
            "pinstage._pool._slab.record_current_streams", lambda event=event: (event,)
        )
        with SlabPool(1000, memory=PinnedMemory()) as pool:
            leases = [pool.acquire(1000).__enter__()]
            during(lambda leases=leases: leases.pop().__exit__(None, None, None))
            stats = pool.stats()
            assert (stats.leased_slabs, stats.in_flight_slabs) in [(0, 1), (1, 0)]
            for lease in list(pool._state.unrecorded):
                assert stats.held_for_good_bytes == 1000
                with pytest.raises(BudgetExceededError):
                    pool.acquire(1000, timeout=60)
                lease.release(after=event)
            event.finish()
            pool.acquire(1000, timeout=0).release()
