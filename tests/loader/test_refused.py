"""A loader where registering memory is refused: workers write into shared slabs all the same, which
are sent as ordinary memory.
"""

import warnings

import loader_data as data
import pytest
import torch
from doubles import LateTarget, wait_until

import pinstage as ps
from pinstage._compat import probes
from pinstage.errors import StagingWarning

INVALID_VALUE, NOT_SUPPORTED = 1, 801
BATCHES = 24


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(probes, "_warned", set())


def pool_of_the_device():
    return ps.SlabPool("8MiB", memory=ps.memory.SharedMemory(0))


def loader_of(pool, **options):
    dataset = data.Mapped(data.large, 2 * BATCHES)
    return ps.DataLoader(dataset, 2, num_workers=2, pool=pool, device="cpu", **options)


def check_batches(loader, target=None):
    """Run a pass, with batches read late; return whether each was sent from page-locked memory."""
    late = loader._slabs.target = target or LateTarget(3)
    expected = torch.utils.data.DataLoader(loader.dataset, 2)
    for batch, right in zip(loader, expected, strict=True):
        assert torch.equal(batch, right)
    return late.pinned


def test_a_refusal_from_the_start(cuda):
    cuda.refuse("cudaHostRegister", NOT_SUPPORTED, 1000)
    with pool_of_the_device() as pool:
        loader = loader_of(pool)
        with pytest.warns(StagingWarning, match=r"801|cudaErrorNotSupported") as told:
            assert check_batches(loader) == [False] * BATCHES
        assert [one.category for one in told].count(StagingWarning) == 1
        stats = loader.stats()
        assert stats.fallback_batches == 0, "nothing was pickled"
        assert stats.pool.held_bytes > stats.pool.pinned_bytes == 0
        del loader
    assert cuda.names() == ["cudaHostRegister"], "one refusal is enough"


def test_a_refusal_of_the_third_slab(cuda):
    """What was registered stays in use, and is sent as such."""
    cuda.fail("cudaHostRegister", NOT_SUPPORTED, nth=3)
    with pool_of_the_device() as pool:
        # Slabs that the loop keeps in use make the workers ask for more.
        leases = [pool.acquire(data.large(0).nbytes * 2) for _ in range(2)]
        with pytest.warns(StagingWarning, match="cudaErrorNotSupported"):
            third = pool.acquire(leases[0].nbytes)
        stats = pool.stats()
        assert (stats.held_slabs, stats.pinned_bytes) == (3, stats.held_bytes // 3 * 2)
        leases.pop().release()
        loader = loader_of(pool)
        assert {True, False} == set(check_batches(loader))
        assert loader.stats().fallback_batches == 0
        third.release()
        leases.pop().release()
        del loader
    assert cuda.names().count("cudaHostRegister") == 3
    assert cuda.registered == {}


@pytest.mark.parametrize("registered", [0, 2])
def test_after_a_refusal_slabs_are_unregistered(cuda, registered):
    """A limit on the memory of this process, as of its third block and all later ones."""
    cuda.coming["cudaHostRegister"] = [0] * registered + [INVALID_VALUE] * 1000
    with pool_of_the_device() as pool:
        # The loop keeps batches, so that the workers need more slabs.
        loader = loader_of(pool, prefetch_factor=4)
        with pytest.warns(StagingWarning, match="cudaErrorInvalidValue") as told:
            pinned = check_batches(loader)
        assert [one.category for one in told].count(StagingWarning) == 1
        assert set(pinned) == {False, registered > 0}
        assert loader.stats().fallback_batches == 0
        assert pool.stats().held_slabs == registered
        check_batches(loader)
        assert loader.stats().fallback_batches == 0
        del loader
    assert cuda.names().count("cudaHostRegister") == registered + 1, "one refusal is enough"
    assert cuda.registered == {}


def test_a_device_that_cannot_register_is_not_asked(cuda):
    cuda.attributes["HOST_REGISTER_SUPPORTED"] = 0
    with pool_of_the_device() as pool, pytest.warns(StagingWarning, match="cuda:0"):
        assert not any(check_batches(loader_of(pool)))
    assert cuda.names() == []


def test_grace_is_as_others(cuda):
    """Registering succeeds there; nobody has measured the other way."""
    cuda.attributes |= {
        "PAGEABLE_MEMORY_ACCESS": 1,
        "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 1,
        "HOST_NUMA_ID": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", StagingWarning)
        with pool_of_the_device() as pool:
            assert all(check_batches(loader_of(pool)))
            assert pool.stats().pinned_bytes == pool.stats().held_bytes > 0


def test_bytes_of_the_queue_outlive_their_copies(monkeypatch):
    """Some devices read ordinary memory themselves, after the call."""

    def refuse(memory, nbytes, device):
        raise OSError("none left")

    monkeypatch.setattr("pinstage.memory.SharedMemory._take", refuse)
    loader, late = loader_of(None), LateTarget(1000)
    message = r"without a slab of .*none left.*pinstage doctor"
    with pytest.warns(StagingWarning, match=message) as told:
        assert check_batches(loader, late) == [False] * BATCHES
    assert [one.category for one in told].count(StagingWarning) == 1
    assert loader.stats().fallback_batches == BATCHES
    wait_until(lambda: late.done == BATCHES)
