"""Regions that are closed and freed with their test."""

import gc
import itertools
import threading

import pytest
from doubles import is_held, region_bytes, wait_until

import pinstage as ps

MIB = 1 << 20


@pytest.fixture(autouse=True)
def all_is_freed():
    """Fail a test after which the memory of a region is still mapped."""
    before = region_bytes()  # of earlier tests of other rooms, perhaps
    yield
    gc.collect()
    wait_until(lambda: region_bytes() <= before)


@pytest.fixture(autouse=True)
def budget_folder(tmp_path, monkeypatch):
    """A folder of host budgets for this test alone."""
    path = tmp_path / "budgets"
    monkeypatch.setenv("PINSTAGE_BUDGET_DIR", str(path))
    return path


@pytest.fixture
def make(request):
    """Make regions of 1 MiB chunks, by default on the CPU; they are closed at the end of the
    test.
    """
    made = []
    # Ends after this.
    cuda = request.getfixturevalue("cuda") if "cuda" in request.fixturenames else None

    def make(nbytes=4 * MIB, *, device="cpu", chunk_bytes=MIB, **options):
        made.append(ps.HostRegion(nbytes, device=device, chunk_bytes=chunk_bytes, **options))
        return made[-1]

    yield make
    memories = [region._chunks.memory for region in made]
    while made:
        made.pop().close()
    gc.collect()
    if cuda is not None:
        wait_until(lambda: not (cuda.registered or cuda.allocated or cuda.context_stack))
    wait_until(lambda: not any(map(is_held, memories)))


@pytest.fixture
def hold_after(cuda):
    """Let page-locking stop after some chunks, until the event that this returns is set."""
    opened, calls = threading.Event(), itertools.count(1)

    def hold(chunks):
        cuda.before["cudaHostRegister"] = lambda: next(calls) <= chunks or opened.wait(20)
        return opened

    yield hold
    opened.set()
