"""torchdata.nodes with `Stage` at the end, and torchdata's other loader."""

import pytest
import torch
from loader_data import Opaque
from programs import reports
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher

from pinstage.errors import LayoutError
from pinstage.integrations.torchdata import Stage


def pipeline(stager, depth=2):
    node = IterableWrapper(range(32))
    node = Batcher(ParallelMapper(node, torch.tensor, num_workers=2, method="thread"), 4)
    return Loader(
        Stage(Mapper(node, torch.stack), stager, depth=depth), restart_on_stop_iteration=False
    )


def firsts(batches):
    return [int(batch[0]) for batch in batches]


@pytest.mark.parametrize("way", ["pinstage", "plain"])
def test_two_stopped_processes_resume_to_equal_losses(tmp_path, way):
    whole = reports("train_nodes.py", tmp_path / "whole", "--way", "plain")
    keep = ("--way", way, "--checkpoint", tmp_path / "kept")
    first = reports("train_nodes.py", tmp_path / "first", *keep, "--steps", "5")
    second = reports("train_nodes.py", tmp_path / "second", *keep)
    for rank in range(2):
        assert first[rank]["samples"] + second[rank]["samples"] == whole[rank]["samples"]
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert len(whole[rank]["losses"]) == 2 * 64 // 4 // 2
        if way == "pinstage":
            assert first[rank]["batches"] == 5 + 2  # two were ahead
            assert second[rank]["batches"] == 16 - 5


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
@pytest.mark.parametrize("yielded", range(9))
def test_the_state_is_that_of_yielded_batches(stager, depth, yielded):
    loader = pipeline(stager, depth=depth)
    batches = iter(loader)
    assert firsts(next(batches) for _ in range(yielded)) == list(range(0, 4 * yielded, 4))
    again = pipeline(stager, depth=depth)
    again.load_state_dict(loader.state_dict())
    assert firsts(again) == list(range(4 * yielded, 32, 4))


def test_an_abandoned_pass_starts_over(stager):
    loader = pipeline(stager)
    for batch in loader:
        if int(batch[0]) == 8:
            break
    assert firsts(loader) == firsts(loader) == list(range(0, 32, 4))


def test_it_may_feed_a_prefetcher(stager):
    node = Stage(Mapper(Batcher(IterableWrapper(range(8)), 4), torch.tensor), stager)
    assert firsts(Loader(Prefetcher(node, 2))) == [0, 4]


def test_an_error_comes_after_the_batches_before_it(stager):
    def fails():
        yield from range(8)
        raise OSError("gone")

    seen = []
    node = Stage(Mapper(Batcher(IterableWrapper(fails()), 4), torch.tensor), stager)
    with pytest.raises(OSError, match="gone"):
        seen.extend(Loader(node))
    node = Stage(IterableWrapper([torch.ones(1), Opaque(torch.ones(2))]), stager)
    with pytest.raises(LayoutError):
        seen.extend(Loader(node))
    assert len(seen) == 3
