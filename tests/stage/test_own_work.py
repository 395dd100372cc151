"""`Stager.prefetch` names `wrap_loader` if reading and packing take much of a pass."""

import itertools
import time
import types

import pytest
import torch
from loader_data import Costly, compute, same
from torch.utils.data import DataLoader

import pinstage as ps
from pinstage.errors import StagingWarning

pytestmark = [
    pytest.mark.usefixtures("nothing_said"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

HINT = (
    r"prefetch reads and packs the batches of this DataLoader in the main process: \d\.\d\d s of a "
    r'pass of \d+\.\d\d s\. .*: iterate over pinstage\.wrap_loader\(loader, device="cpu"\) instead'
)
BATCHES = 12


@pytest.fixture
def alone(monkeypatch):
    """Let passes be as long as on an idle machine, whatever else runs: waiting takes no time."""
    clock = types.SimpleNamespace(perf_counter=time.process_time, thread_time=time.thread_time)
    monkeypatch.setattr("pinstage._stage._own_work.time", clock)


class Slow(Costly):
    def __reduce__(self):
        time.sleep(10 * Costly.SECONDS)
        return super().__reduce__()


class Broken:
    """A batch that can't be unpickled."""

    def __reduce__(self):
        return divmod, (1, 0)


class Computed(list):
    def __getitem__(self, index):
        return compute(Costly.SECONDS)


def loader(*batches):
    dataset = batches if batches[1:] else batches * BATCHES
    return DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")


def is_costly_to_pack(path, leaf):
    compute(Costly.SECONDS)
    return False


@pytest.mark.usefixtures("alone")
def test_much_reading_in_the_main_process_warns_once(prefetch):
    batches = prefetch(loader(Costly()))
    with pytest.warns(StagingWarning, match=HINT) as said:
        assert same(list(batches), [torch.ones(3)] * BATCHES)
    (hint,) = [warning for warning in said if warning.category is StagingWarning]
    assert hint.filename == __file__
    list(batches)
    list(prefetch(loader(Costly())))


@pytest.mark.usefixtures("alone")
def test_much_packing_in_the_main_process_warns(prefetch):
    stager = ps.Stager("cpu", max_bytes="8MiB", keep_on_host=is_costly_to_pack)
    with stager, pytest.warns(StagingWarning, match=HINT):
        list(prefetch(loader(torch.ones(3)), stager=stager))


def test_slow_workers_warn_nobody(prefetch):
    list(prefetch(loader(Slow())))


def test_a_slow_loop_warns_nobody(prefetch):
    for _ in prefetch(loader(Costly())):
        time.sleep(10 * Costly.SECONDS)


@pytest.mark.usefixtures("alone")
def test_a_pass_that_does_not_end_warns_nobody(prefetch):
    list(itertools.islice(prefetch(loader(Costly())), BATCHES - 1))
    with pytest.raises(ZeroDivisionError):
        list(prefetch(loader(*[Costly()] * BATCHES, Broken())))


@pytest.mark.parametrize(
    "source",
    [
        lambda: DataLoader(Computed(range(BATCHES)), batch_size=None),
        lambda: (compute(Costly.SECONDS) for _ in range(BATCHES)),
        lambda: ps.wrap_loader(loader(Costly()), device="cpu"),
    ],
    ids=["no workers", "a generator", "wrapped"],
)
def test_sources_without_packing_workers_warn_nobody(prefetch, source):
    list(prefetch(source()))


@pytest.mark.usefixtures("alone")
def test_the_first_batch_does_not_count(prefetch):
    list(prefetch(loader(Costly(0.5), *[torch.ones(3)] * 10), depth=0))
