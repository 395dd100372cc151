"""Shared fixtures. Everything that a test takes through the pool fixtures must be returned at its
end.
"""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import signal
import threading

import fake_driver
import pytest
import torch
from doubles import CountingMemory, shared_files, slabs_for_all, wait_until
from fake_cuda import FakeCuda
from hypothesis import HealthCheck, settings
from paths import PATHS, on_path

from pinstage import SlabPool, Stager
from pinstage._compat.calls import CudaCalls
from pinstage._memory import _cuda, _resource, _streams

# No deadline per example: the machine may be busy.
_always = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run; .ci/run uses `thorough`.
settings.register_profile("quick", _always, derandomize=True, max_examples=60)
settings.register_profile("thorough", _always, derandomize=True, max_examples=300)
settings.register_profile("random", _always, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(params=PATHS)
def both_paths(request):
    """Run a test twice: with torch's private functions, and with public ones, as if a probe had
    failed.
    """
    with on_path(request.param):
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves live bytes in any `CountingMemory`."""
    CountingMemory.made.clear()
    yield
    with contextlib.suppress(AssertionError):  # a dropped pool is freed by another thread
        wait_until(lambda: not any(memory.live_bytes for memory in CountingMemory.made))
    live = [memory.live_bytes for memory in CountingMemory.made]
    CountingMemory.made.clear()
    assert not any(live), f"live bytes left behind: {live}"


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Keep imported objects out of collections, since many tests need some. Some modules are
    imported by tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Let torch compute in one thread, here and in started programs: on busy CPUs its threads wait
    for one another, and some tests took ten times as long.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_forkserver():
    """Let workers of multiprocessing's fork server have torch already."""
    multiprocessing.set_forkserver_preload(["torch"])


@pytest.fixture(autouse=True, scope="session")
def own_folder(tmp_path_factory):
    """Keep files of a `HostBudget` out of the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PINSTAGE_BUDGET_DIR", str(tmp_path_factory.mktemp("host") / "budgets"))
        yield


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt this process and programs that it starts, even if our parent ignores
    it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tree(tmp_path):
    """Write files, ``{path: text}``, below a fake root directory; return the root."""

    def write(contents):
        for path, content in contents.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return tmp_path

    return write


@pytest.fixture
def memory():
    return CountingMemory()


@pytest.fixture
def background():
    """Call a function in another thread: ``background(function, *args, **kwargs)`` returns its
    future.
    """
    with concurrent.futures.ThreadPoolExecutor(64) as executor:
        yield executor.submit


@pytest.fixture
def make_pool(background, memory):
    """Make pools over `memory` that close at the end of the test, and fail it if a slab is still in
    use then.
    """
    # After `background`, so that a thread that waits in a pool is woken before it is joined.
    pools = []

    def make(max_bytes=1000, *, memory=memory):
        pools.append(SlabPool(max_bytes, memory=memory))
        return pools[-1]

    yield make
    in_use = []
    for pool in pools:
        stats = pool.stats()
        if stats.leased_slabs or stats.in_flight_slabs:
            in_use.append((pool, stats))
        pool.close()
    assert not in_use, f"slabs left behind in use: {in_use}"


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture
def make_stager(make_pool):
    """Make stagers to the CPU, each with its own pool from `make_pool`."""

    def make(max_bytes="1MiB", **options):
        return Stager("cpu", pool=make_pool(max_bytes), **options)

    return make


@pytest.fixture
def stager():
    """A stager to the CPU."""
    with Stager("cpu", max_bytes="8MiB") as stager:
        yield stager


@pytest.fixture(params=[False, True], ids=["here", "in a thread"])
def prefetch(request, stager):
    """Prefetch with a thread and without one. At a depth of 0 there is never a thread."""

    def prefetch(source, *, depth=2, stager=stager):
        return stager.prefetch(source, depth=depth, background=request.param and depth > 0)

    return prefetch


@pytest.fixture(name="slabs_for_all")
def _slabs_for_all(monkeypatch):
    """Let small batches take a slab too, instead of being copied from pageable memory."""
    slabs_for_all(monkeypatch)


@pytest.fixture
def growing_again(monkeypatch):
    """Let a pool that was refused memory ask again at once, instead of after a minute."""
    monkeypatch.setattr("pinstage._pool._growth.RETRY_SECONDS", 0.0)


@pytest.fixture
def nothing_said(monkeypatch):
    """Forget the warnings of earlier tests that are shown once in a process."""
    monkeypatch.setattr("pinstage._compat.probes._warned", set())


@pytest.fixture
def no_polling(monkeypatch):
    """Let the pool's waiters sleep until they are woken, so that a missed wake-up is seen."""
    monkeypatch.setattr("pinstage._pool._pool.POLL_SECONDS", (60.0, 60.0))
    monkeypatch.setattr("pinstage._pool._pool.BEHIND_SECONDS", 60.0)


@pytest.fixture
def capture(monkeypatch):
    """Make blocks in which the current stream of this thread captures a graph, as torch tells
    it.
    """

    @contextlib.contextmanager
    def block():
        thread, handle = threading.get_ident(), 0x5EED
        calls = CudaCalls(lambda: 0, None, lambda _: handle, None)
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.is_initialized", lambda: threading.get_ident() == thread)
            patch.setattr("torch.cuda.current_device", lambda: 0)
            patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
            patch.setattr(_streams, "cuda_calls", lambda: calls)
            yield

    return block


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(_cuda, "_bindings", _cuda.Bindings(fake, fake))
    monkeypatch.setattr(_resource, "LEAKED", [])
    open_before = shared_files()
    yield fake
    assert fake.context_stack == [], "another context than before stayed current"
    assert fake.last_error == 0, "an error was left behind"
    assert {block.ptr for block in _resource.LEAKED} == set(fake.registered) | set(
        fake.allocated
    ), "bytes are live"
    if not _resource.LEAKED:
        # The thread that unmaps a file closes it afterwards.
        wait_until(lambda: shared_files() <= open_before)


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("driver")


@pytest.fixture
def driver(driver_folder):
    """The driver of `fake_driver`. Nothing is page-locked yet."""
    found = fake_driver.Driver(fake_driver.library(driver_folder))
    found.reset()
    yield found
    found.reset()
