"""Stagers with a device of the test's own, and one for property tests."""

import pytest
from doubles import HeldOut, LoggedTarget, use_target

from pinstage import Stager


@pytest.fixture(scope="module")
def shared_stager():
    with Stager("cpu", max_bytes="64MiB", pack_threads=2) as stager:
        yield stager


@pytest.fixture
def device():
    """The device of `queue`, whose events the test finishes."""
    return LoggedTarget()


@pytest.fixture
def queue(make_stager, device):
    """A stager to `device`."""
    stager = make_stager("64MiB")
    use_target(stager, device)
    yield stager
    device.finish()


@pytest.fixture
def held(stager):
    """The stager's copies to the host, which the test makes."""
    return HeldOut(stager)
