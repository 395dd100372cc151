"""Copies that are done late."""

import pytest
from doubles import QueuedTarget, known


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
            monkeypatch.setattr(f"pinstage.offload.{module}.shared_targets", known(target))
        return target

    yield use
    for target in targets:
        target.run_all()
        assert target.lost == 0, "memory was freed before a copy was done"
