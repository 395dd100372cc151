"""A loader whose arguments become another loader's says so, unless that one stages as well."""

import gc
import subprocess
import sys
import textwrap
import warnings

import loader_data as data
import pytest
import torch
from doubles import wait_until

import pinstage as ps
from pinstage._loader import _unused
from pinstage._reaper import reaper

DATASET = data.Mapped(data.scalar, 8)


class Plain(torch.utils.data.DataLoader):
    """A class of its own, as frameworks have some."""


def staging(**options):
    return ps.DataLoader(DATASET, 2, device="cpu", **options)


def wrapped(**options):
    return ps.wrap_loader(Plain(DATASET, 2), device="cpu", **options)


@pytest.fixture(params=[staging, wrapped])
def make(request):
    return request.param


@pytest.fixture
def told():
    """What was warned of, at the end of the reaper's work."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def told():
            gc.collect()
            done = []
            reaper.tasks.put(Last(done))
            wait_until(lambda: done)
            return [str(warning.message) for warning in caught]

        yield told


class Last:
    def __init__(self, done):
        self.reap = lambda: done.append(True) or True


def take_apart(loader):
    """Do what Accelerate and Ray do."""
    options = {name: getattr(loader, name) for name in ("collate_fn", "timeout", "multiprocessing_context")}
    return torch.utils.data.DataLoader(loader.dataset, loader.batch_size, **options)


def test_a_loader_that_was_taken_apart_says_so_when_it_is_gone(make, told):
    loader = make()
    other = take_apart(loader)
    assert len(list(other)) == 4
    assert told() == []
    del loader
    [message] = told()
    assert message.startswith(
        "pinstage staged no batch of a DataLoader: none was taken from it, but its arguments were"
    )
    assert "ps.wrap_loader(accelerator.prepare(loader))" in message


@pytest.mark.parametrize("first", [True, False])
def test_a_loader_that_is_used_says_nothing(make, told, first):
    loader = make()
    if first:
        list(loader)
    take_apart(loader)
    list(loader)
    del loader
    assert told() == []


def test_a_loader_that_nobody_asks_says_nothing(make, told):
    loader = make()
    assert (len(loader), len(loader.dataset)) == (4, 8)
    del loader
    assert told() == []


def test_a_loader_that_is_made_anew_counts_for_the_first_one(make, told):
    loader = make()
    take_apart(loader)
    anew = staging() if make is staging else type(loader)(loader.dataset, batch_size=2)
    assert torch.cat(list(anew)).tolist() == list(range(8))
    assert loader.stats().batches == anew.stats().batches == 4
    del loader
    assert told() == []


def test_a_loader_with_other_settings_is_another_loader(told):
    loader = staging(max_bytes="2MiB")
    take_apart(loader)
    list(staging(max_bytes="1MiB"))
    assert loader.stats().batches == 0
    del loader
    assert len(told()) == 1


def test_a_loader_that_is_there_to_the_end_says_so_there():
    program = """
        import torch, pinstage as ps
        loader = ps.DataLoader(torch.arange(8), 2, device="cpu")
        loader.timeout
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert result.stderr.count("pinstage staged no batch of a DataLoader") == 1


def test_a_warning_that_is_an_error_does_not_stop_the_reaper(make):
    loader = make()
    take_apart(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del loader
        gc.collect()
        done = []
        reaper.tasks.put(Last(done))
        wait_until(lambda: done)


def test_a_loader_without_a_hash_may_be_taken_apart():
    class Unhashable(torch.utils.data.DataLoader):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError

    loader = ps.wrap_loader(Unhashable(DATASET, 2), device="cpu")
    take_apart(loader)
    assert any(found is loader for found in _unused._read.values())
    list(loader)


class Ignoring(torch.utils.data.DataLoader):
    """Has batches of its own."""

    def __iter__(self):
        return iter([torch.ones(1)])


class IgnoringWithAGenerator(torch.utils.data.DataLoader):
    def __iter__(self):
        yield torch.ones(1)


@pytest.mark.parametrize("cls", [Ignoring, IgnoringWithAGenerator])
def test_a_class_that_makes_no_iterator_of_torchs_is_told_once(cls, told):
    loader = ps.wrap_loader(cls([1]), device="cpu")
    assert [len(list(loader)) for _ in range(2)] == [1, 1]
    [message] = told()
    assert "its class does not get its iterator from torch's DataLoader" in message
