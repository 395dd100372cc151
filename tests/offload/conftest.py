"""Copies that are done late, and a pool that is idle at the end."""

import pytest
from doubles import QueuedTarget, assert_idle

from pinstage._stage import Target, Targets


@pytest.fixture
def late(monkeypatch):
    """Let copies of all offloading be late: ``late(out, back)`` returns the `QueuedTarget`. At the
    end all are done, and must have found their memory.
    """
    targets = []

    def use(out, back):
        target = QueuedTarget(out, back)
        targets.append(target)
        for module in ("_frozen", "_optimizer", "_saving"):
            monkeypatch.setattr(f"pinstage.offload.{module}.shared_targets", Targets(target))
        return target

    yield use
    for target in targets:
        target.run_all()
        assert target.lost == 0, "memory was freed before a copy was done"


@pytest.fixture(params=[None, (6, 6)], ids=["at once", "late"])
def target(request, late):
    """Run a test twice: with copies that are done at once, and with copies that are done on a
    wait.
    """
    return request.param and late(*request.param)


@pytest.fixture
def device_type(target):
    """The class of the device, whose copies a test may watch or let fail."""
    return Target if target is None else type(target)


@pytest.fixture
def pool(make_pool, target):
    pool = make_pool(4 << 20)
    yield pool
    assert_idle(pool, target)
