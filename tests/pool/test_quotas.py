"""Owners and their quotas: counts, guarantees, limits, and the order in which requests are
served.
"""

import concurrent.futures
import itertools

import pytest
import torch
from doubles import (
    CountingMemory,
    Gate,
    ManualEvent,
    outcome,
    wait_until,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pinstage import DataLoader, SlabPool, Stager
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    PoolFrozenError,
)
from pinstage.memory import PageableMemory, SharedMemory

pytestmark = pytest.mark.usefixtures("no_polling")


# -- bytes by owner


def test_waits_are_counted_for_who_waited(pool, waiting):
    with pool.acquire(1000, owner="train"):
        waiter = waiting(pool, 100, owner="eval")
    outcome(waiter).release()
    owners = pool.stats().owners
    assert (owners["eval"].waits, owners["train"].waits) == (1, 0)
    assert 0 < owners["eval"].wait_seconds < 10
    assert owners["train"].wait_seconds == 0


def test_a_stager_leases_under_its_owner_s_name():
    with SlabPool("1MiB", memory=PageableMemory()) as pool:
        Stager("cpu", pool=pool).to_device([1.0])
        Stager("cpu", pool=pool).to_device(torch.ones(400_000)[::2])
        Stager("cpu", pool=pool, owner="eval").to_device(torch.ones(400_000)[::2])
        assert list(pool.stats().owners) == ["stager", "eval"]


@pytest.mark.parametrize("owner", ["", None, 3])
def test_an_owner_without_a_name_is_refused(pool, memory, owner):
    with pytest.raises(ValueError, match=r"owner must be a name: .*; pass text"):
        pool.acquire(100, owner=owner)
    with pytest.raises(ValueError, match="owner must be a name"):
        pool.set_quota(owner)
    assert (pool.stats().owners, memory.allocations) == ({}, 0)


def test_an_owner_can_lease_its_room(pool):
    pool.set_quota("checkpoint", max_bytes=500)
    pool.set_quota("loader", min_bytes=300)
    with pool.acquire(208, owner="checkpoint"), pool.acquire(104, owner="loader"):
        owners = pool.stats().owners
        assert owners["checkpoint"].available_bytes == 500 - 208
        assert owners["loader"].available_bytes == 1000 - 208 - 104
        pool.acquire(292, owner="checkpoint", timeout=0).release()


# -- bounds


def test_a_bound_counts_what_is_being_allocated(pool, memory, background):
    pool.set_quota("checkpoint", max_bytes=400)
    memory.allocate_gate = Gate()
    first = background(pool.acquire, 300, owner="checkpoint")
    memory.allocate_gate.wait_for_arrival()
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(300, owner="checkpoint", timeout=0)
    memory.allocate_gate.open()
    outcome(first).release()


# -- guarantees


def test_quotas_of_a_frozen_pool_divide_its_slabs(pool, background):
    pool.reserve(100, count=4)
    pool.freeze()
    pool.set_quota("loader", min_bytes=208)
    with pool.acquire(100, owner="eval"), pool.acquire(100, owner="eval"):
        with pytest.raises(AcquireTimeoutError):
            pool.acquire(100, owner="eval", timeout=0)
        with (
            pool.acquire(100, owner="loader", timeout=0),
            pool.acquire(100, owner="loader", timeout=0),
        ):
            pass
        pool.set_quota("loader", min_bytes=416)
        with pytest.raises(PoolFrozenError, match="largest slab 0 B"):
            pool.acquire(100, owner="eval")


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        (
            {"min_bytes": 500, "max_bytes": 400},
            "quota of 'eval' is impossible: min_bytes=500, max_bytes=400; pass",
        ),
        ({"max_bytes": 0}, "max_bytes is too small: 0"),
        ({"max_bytes": "2"}, "max_bytes is too small: '2'"),
        (
            {"min_bytes": 601},
            r"quotas do not fit: 1001 bytes would be guaranteed in all, max_bytes is 1000; guarantee",
        ),
        ({"min_bytes": -1}, "negative"),
        ({"max_bytes": "much"}, "not a size"),
    ],
)
def test_an_impossible_quota_is_refused_and_changes_nothing(pool, quota, message):
    pool.set_quota("loader", min_bytes=400)
    with pytest.raises(ValueError, match=message):
        pool.set_quota("eval", **quota)
    assert list(pool.stats().owners) == ["loader"]
    pool.acquire(600, owner="eval", timeout=0).release()


def test_a_guarantee_is_of_whole_units():
    memory = CountingMemory(granularity=64)
    with SlabPool(640, memory=memory) as pool:
        pool.set_quota("loader", min_bytes=65)
        assert pool.stats().owners["loader"].min_bytes == 128
        with pytest.raises(BudgetExceededError):
            pool.acquire(513, owner="eval")


# -- a loader


def test_a_loader_at_its_limit_goes_on():
    data = [torch.full((1000,), float(i)) for i in range(16)]
    with SlabPool("1MiB", memory=SharedMemory(register=False)) as pool:
        pool.set_quota("loader", max_bytes=40_000)
        loader = DataLoader(data, batch_size=2, num_workers=2, device="cpu", pool=pool)
        got = [batch[:, 0].tolist() for batch in loader]
        assert got == [[float(i), float(i + 1)] for i in range(0, 16, 2)]
        assert loader.stats().fallback_batches == 0
        assert 0 < loader.stats().pool.peak_held_bytes <= 40_000
        del loader


# -- a model

CAP = 1000
NO_BOUND = 10**9
OWNERS = ("loader", "checkpoint", "eval")
SIZES = st.sampled_from([64, 100, 128, 200, 333, 512, 640, 1000])


class Asked:
    """A request that waits, or was served."""

    def __init__(self, owner, nbytes, future):
        self.owner, self.nbytes, self.future = owner, nbytes, future
        self.lease = self.event = None

    def serve(self, lease):
        self.lease, self.capacity = lease, lease.capacity


class QuotasMachine(RuleBasedStateMachine):
    """The pool compared with a second implementation of the rules of `SlabPool.set_quota`.

    Each request waits in a thread. After each step the model computes which requests must have been
    served, which must not, and which can never be; from the pool it takes only the sizes of leased
    slabs.
    """

    def __init__(self):
        super().__init__()
        self.executor = concurrent.futures.ThreadPoolExecutor(64)
        self.memory = CountingMemory()
        self.pool = SlabPool(CAP, memory=self.memory)
        self.quotas = dict.fromkeys(OWNERS, (0, NO_BOUND))
        self.waiting, self.busy = [], []
        self.numbers = itertools.count()

    @initialize(least=st.sampled_from([0, 200, 512]), most=st.sampled_from([NO_BOUND, 300, 640]))
    def begin(self, least, most):
        self.set_quota("loader", least, NO_BOUND)
        self.set_quota("checkpoint", 0, most)

    # -- the model

    def used(self, owner):
        return sum(asked.capacity for asked in self.busy if asked.owner == owner)

    def most(self, owner):
        others = sum(least for name, (least, _) in self.quotas.items() if name != owner)
        return min(self.quotas[owner][1], CAP - others)

    def check_refused(self, owner, nbytes, future):
        message = (
            f"requested {nbytes} B, quotas leave '{owner}' at most {self.most(owner)} B.*set_quota"
        )
        with pytest.raises(BudgetExceededError, match=message):
            outcome(future)

    def can_now(self, owner, nbytes, ahead):
        used, (least, most) = self.used(owner), self.quotas[owner]
        if used + nbytes > most:
            return False
        kept = sum(max(self.used(name), self.quotas[name][0]) for name in OWNERS if name != owner)
        if used + nbytes + kept > CAP or any(asked.owner == owner for asked in ahead):
            return False
        in_the_way = [a for a in ahead if self.used(a.owner) + a.nbytes <= self.quotas[a.owner][1]]
        return not in_the_way or used + nbytes <= least

    def settle(self):
        """Check that exactly the requests that must be served or refused are."""
        for asked in list(self.waiting):
            if asked.nbytes > self.most(asked.owner):
                self.check_refused(asked.owner, asked.nbytes, asked.future)
                self.waiting.remove(asked)
        while True:
            due = [
                a
                for i, a in enumerate(self.waiting)
                if self.can_now(a.owner, a.nbytes, self.waiting[:i])
            ]
            if not due:
                break
            due[0].serve(outcome(due[0].future))  # fails if it is not served
            self.waiting.remove(due[0])
            self.busy.append(due[0])
        assert not any(asked.future.done() for asked in self.waiting), (
            "served out of turn, or beyond a quota"
        )
        assert self.busy or not self.waiting, "all wait, and no slab is in use: a deadlock"

    # -- the rules

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(owner=st.sampled_from(OWNERS), nbytes=SIZES)
    def ask(self, owner, nbytes):
        before = self.pool.stats().waits
        can_ever = nbytes <= self.most(owner)
        immediate = can_ever and self.can_now(owner, nbytes, self.waiting)
        future = self.executor.submit(self.pool.acquire, nbytes, owner=owner)
        if can_ever:
            self.waiting.append(Asked(owner, nbytes, future))
            if not immediate:
                wait_until(lambda: self.pool.stats().waits == before + 1 or future.done())
        else:
            self.check_refused(owner, nbytes, future)
        self.settle()

    @rule(owner=st.sampled_from(OWNERS), nbytes=SIZES)
    def ask_without_waiting(self, owner, nbytes):
        expected = self.can_now(owner, nbytes, self.waiting)
        try:
            lease = self.pool.acquire(nbytes, owner=owner, timeout=0)
        except BudgetExceededError:
            assert nbytes > self.most(owner)
        except AcquireTimeoutError:
            assert not expected
        else:
            assert expected
            self.busy.append(Asked(owner, nbytes, None))
            self.busy[-1].serve(lease)
        self.settle()

    @precondition(lambda self: any(asked.event is None for asked in self.busy))
    @rule(data=st.data(), later=st.booleans())
    def release(self, data, later):
        asked = data.draw(st.sampled_from([asked for asked in self.busy if asked.event is None]))
        if later:
            asked.event = ManualEvent()
        else:
            self.busy.remove(asked)
        asked.lease.release(after=asked.event)
        self.settle()

    @precondition(lambda self: any(asked.event is not None for asked in self.busy))
    @rule(data=st.data())
    def finish(self, data):
        asked = data.draw(
            st.sampled_from([asked for asked in self.busy if asked.event is not None])
        )
        self.busy.remove(asked)
        self.finish_event(asked)

    def finish_event(self, asked):
        asked.event.finish()
        # Events wake no thread, and nothing polls; this wakes all.
        self.set_quota("eval", *self.quotas["eval"])

    @rule(
        owner=st.sampled_from(OWNERS),
        least=st.sampled_from([0, 100, 333, 512]),
        most=st.sampled_from([NO_BOUND, 200, 512]),
    )
    def set_quota(self, owner, least, most):
        others = sum(least for name, (least, _) in self.quotas.items() if name != owner)
        bound = None if most == NO_BOUND else most
        if least > most or others + least > CAP:
            with pytest.raises(ValueError, match="quota"):
                self.pool.set_quota(owner, min_bytes=least, max_bytes=bound)
            return
        self.quotas[owner] = least, most
        self.pool.set_quota(owner, min_bytes=least, max_bytes=bound)
        self.settle()

    @rule(to_bytes=st.sampled_from([0, 300]))
    def trim(self, to_bytes):
        self.pool.trim(to_bytes=to_bytes)
        self.settle()

    @invariant()
    def the_figures_are_those_of_the_model(self):
        assert self.memory.peak_live_bytes <= CAP
        for owner, figures in self.pool.stats().owners.items():
            leased = sum(a.capacity for a in self.busy if a.owner == owner and a.event is None)
            assert (figures.held_bytes, figures.leased_bytes) == (self.used(owner), leased)

    def teardown(self):
        CountingMemory.made.remove(self.memory)
        try:
            while self.busy:
                asked = self.busy.pop()
                if asked.event is not None:
                    self.finish_event(asked)
                else:
                    asked.lease.release()
                    self.settle()
            assert not self.waiting
        finally:
            self.pool.close()  # ends all waiting requests
            self.executor.shutdown()
        assert self.memory.live_bytes == 0


TestQuotas = QuotasMachine.TestCase
TestQuotas.settings = settings(
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
