"""The pool, leases, memory resources and errors as a user writes them. Checked by mypy, never
run.
"""

from typing import Any, assert_type

import numpy as np
import torch

import pinstage as ps
from pinstage._memory import Block


def by_hand(event: torch.cuda.Event) -> None:
    with ps.SlabPool(max_bytes="2GiB") as pool:
        with pool.acquire(4096, timeout=1.0) as lease:
            assert_type(lease, ps.Lease)
            assert_type(lease.tensor(), torch.Tensor)
            assert_type(lease.tensor((2, 3), torch.float32), torch.Tensor)
            assert_type(lease.numpy(), np.ndarray[Any, np.dtype[Any]])
            lease.numpy((2, 3), np.float32, offset=64)
            assert_type(lease.nbytes + lease.capacity, int)
            lease.release(after=event)
        assert_type(pool.reserve("64MiB", count=2, background=True), ps.Fence)
        assert_type(pool.trim("1GiB"), int)
        pool.set_quota("loader", min_bytes="64MiB", max_bytes=None)
        pool.freeze()
        assert_type(pool.stats(), ps.PoolStats)
        assert_type(pool.stats().held_bytes, int)
        assert_type(pool.stats().wait_seconds, float)
        pool.acquire("4KiB", timeout=None).release()


def shared() -> None:
    budget = ps.HostBudget("8GiB", name="job7")
    ps.SlabPool("2GiB", budget=budget).close()
    assert_type(budget.usage(), list[ps.PoolUsage])


class Done:
    """Enough of an event for the pool."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Bounded:
    """A custom memory resource."""

    is_pinned = False
    is_shared = False
    granularity = 4096

    def allocate(self, nbytes: int) -> Block:
        return Block(0, nbytes)

    def deallocate(self, block: Block) -> None:
        pass


def memory_resources() -> None:
    own: ps.memory.MemoryResource = Bounded()
    for memory in (
        ps.memory.HostAllocMemory(),
        ps.memory.RegisteredMemory(),
        ps.memory.SharedMemory(),
        ps.memory.PageableMemory(),
        own,
    ):
        ps.SlabPool(1 << 20, memory=memory).close()
    assert_type(ps.memory.default_memory(), ps.memory.MemoryResource)
    ps.SlabPool(max_bytes="auto").acquire(10).release(after=Done())


def errors(pool: ps.SlabPool) -> int:
    try:
        pool.acquire(1 << 40, timeout=0)
    except ps.errors.BudgetExceededError as error:
        _memory: MemoryError = error
        return (
            error.requested_bytes
            + error.held_bytes
            + error.leased_bytes
            + error.in_flight_bytes
            + error.max_bytes
        )
    except ps.errors.AcquireTimeoutError as late:
        _timeout: TimeoutError = late
    except (
        ps.errors.PoolClosedError,
        ps.errors.PoolFrozenError,
        ps.errors.ForkedPoolError,
        ps.errors.LeaseError,
    ) as wrong_state:
        _runtime: RuntimeError = wrong_state
    except ps.errors.LayoutError as layout:
        _type: TypeError = layout
        assert_type(layout.path, str)
    except ps.errors.PinstageError:
        pass
    return 0


def wrong(pool: ps.SlabPool, lease: ps.Lease) -> None:
    ps.SlabPool(None)  # type: ignore[arg-type]
    ps.SlabPool("2GiB", ps.memory.PageableMemory())  # type: ignore[call-arg,arg-type]
    ps.SlabPool(max_bytes=ps.HostBudget("2GiB", name="job"))  # type: ignore[arg-type]
    ps.HostBudget("2GiB")  # type: ignore[call-arg]
    pool.acquire(4096, 1.0)  # type: ignore[call-arg]
    pool.acquire(1.5)  # type: ignore[arg-type]
    pool.reserve(4096, 2)  # type: ignore[call-arg]
    pool.max_bytes = 4096  # type: ignore[misc]
    pool.stats().held_bytes = 0  # type: ignore[misc]
    lease.release(Done())  # type: ignore[call-arg]
    lease.release(after=3)  # type: ignore[arg-type]
    lease.tensor((2, 3), torch.float32, 4)  # type: ignore[call-arg]
    lease.nbytes = 3  # type: ignore[misc]
    _memory: ps.memory.MemoryResource = Done()  # type: ignore[assignment]
    ps.memory.PageableMemory(4096)  # type: ignore[call-arg]
