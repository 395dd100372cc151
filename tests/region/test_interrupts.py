"""KeyboardInterrupt at all kinds of points of regions, and of pools with a `HostBudget`: nothing
stays behind.
"""

import gc
import os

import pytest
from doubles import budget_files, interrupts, region_bytes, wait_until

import pinstage as ps

FILES = ("_region.py", "_chunks.py", "_ranges.py", "_reaper.py", "_host_budget.py", "_rows.py")
MIB = 1 << 20

STEP = 1 if os.environ.get("EVERY_NTH_LINE") == "1" else 3
"""Step between the points of the interrupts; with 1, the tests take some 20 seconds."""


@pytest.fixture
def budget(monkeypatch):
    monkeypatch.setattr("pinstage._reaper._POLL_SECONDS", 1e-3)
    monkeypatch.setattr("pinstage._region._chunks._PAUSE_SECONDS", 0)
    return ps.HostBudget("16MiB", name="interrupts")


def shared_region(budget):
    with (
        ps.HostRegion(2 * MIB, chunk_bytes=MIB, budget=budget, device="cpu", shared=True) as region,
        ps.HostRegion.from_handle(region.handle(), device="cpu") as again,
    ):
        again.tensor(1).fill_(1)


def region_on_a_device(budget):
    with ps.HostRegion(2 * MIB, chunk_bytes=MIB, budget=budget, device=0) as region:
        region.synchronize()


def pool(budget):
    with ps.SlabPool(budget=budget, memory=ps.memory.PageableMemory()) as pool:
        pool.acquire(MIB).release()


def pool_of_shared_memory(budget):
    with ps.SlabPool(budget=budget, memory=ps.memory.SharedMemory(register=False)) as pool:
        pool.acquire(MIB).release()


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
@pytest.mark.parametrize(
    "work", [shared_region, region_on_a_device, pool, pool_of_shared_memory, ps.HostBudget.usage]
)
def test_nothing_stays_behind_after_an_interrupt(budget, cuda, work):
    for during in interrupts(*FILES, step=STEP, at_least=6):
        during(lambda: work(budget))
        gc.collect()
        wait_until(lambda: not region_bytes())
        wait_until(lambda: not budget_files())
        assert not cuda.registered
        assert sum(used.held_bytes for used in budget.usage()) == 0


def test_an_error_that_is_kept_keeps_no_memory(budget, monkeypatch):
    kept = []
    for name in ("touch_first", "map"):
        with monkeypatch.context() as patch:
            patch.setattr(f"pinstage._memory._ranges.HostRange.{name}", lambda *_: 1 / 0)
            for shared in (False, True):
                with pytest.raises(ZeroDivisionError) as caught:
                    ps.HostRegion(3 * MIB, budget=budget, device="cpu", shared=shared)
                kept.append(caught.value)
    with pytest.raises(ps.errors.BudgetExceededError) as caught:
        ps.HostRegion(17 * MIB, budget=budget, device="cpu")
    kept.append(caught.value)
    wait_until(lambda: not region_bytes())
    wait_until(lambda: not budget_files())
    assert sum(used.held_bytes for used in budget.usage()) == 0
