"""Frameworks that need no pinstage module: webdataset's loader, and torchrec's pipeline."""

import pytest
import torch
import webdataset as wds
from programs import reports
from train_webdataset import nested, write


@pytest.mark.parametrize(("program", "steps"), [("train_webdataset.py", 2 * 8), ("train_torchrec.py", 2 * 10)])
def test_two_processes_train_to_the_framework_s_losses(tmp_path, program, steps):
    plain, ours = (reports(program, tmp_path / way, "--way", way) for way in ("plain", "pinstage"))
    for one, other in zip(ours, plain, strict=True):
        assert one["losses"] == other["losses"]
        assert one.get("samples") == other.get("samples")
        assert len(one["losses"]) == one["batches"] == steps
    assert ours[0]["losses"] != ours[1]["losses"]


# -- webdataset --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shards"), 2, 8)


def web_loader(urls, workers):
    data = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode().map(nested)
    return wds.WebLoader(data.batched(4, torch.utils.data.default_collate), batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_web_loader_ending_in_prefetch_yields_everything(stager, urls, workers):
    loader = web_loader(urls, workers).compose(stager.prefetch)
    expected = [batch["index"].tolist() for batch in web_loader(urls, workers)]
    assert len(expected) == 4
    for _ in range(2):
        assert [batch["index"].tolist() for batch in loader] == expected
    assert stager.stats().batches == 8


def test_a_web_loader_s_epoch_can_be_repeated(stager, urls):
    loader = web_loader(urls, 1).repeat(3).compose(stager.prefetch).with_epoch(6)
    for _ in range(2):
        assert len(list(loader)) == 6


def test_reshuffled_web_batches_are_staged_afterwards(stager, urls):
    data = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode().to_tuple("index.cls", "codes.npy")
    loader = wds.WebLoader(data.batched(4), batch_size=None, num_workers=1).unbatched().shuffle(8).batched(2)
    batches = list(loader.compose(stager.prefetch))
    assert sorted(index for indices, _ in batches for index in indices.tolist()) == list(range(16))
    assert all(codes.shape == (2, 6) for _, codes in batches)
    assert stager.stats().batches == len(batches) == 8
