"""Frameworks that need no pinstage module: webdataset's loader, and torchrec's pipeline."""

import pytest
import torch
import webdataset as wds
from programs import reports
from train_webdataset import nested, write

import pinstage as ps


@pytest.mark.parametrize(
    ("program", "way", "steps"),
    [
        ("train_webdataset.py", "pinstage", 2 * 8),
        ("train_webdataset.py", "prefetch", 2 * 8),
        ("train_torchrec.py", "pinstage", 2 * 10),
    ],
)
def test_two_processes_train_to_the_framework_s_losses(tmp_path, program, way, steps):
    plain, ours = (reports(program, tmp_path / each, "--way", each) for each in ("plain", way))
    for one, other in zip(ours, plain, strict=True):
        assert one["losses"] == other["losses"]
        assert one.get("samples") == other.get("samples")
        assert len(one["losses"]) == one["batches"] == steps
    assert ours[0]["losses"] != ours[1]["losses"]


# -- webdataset ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shards"), 2, 8)


def web_data(urls):
    data = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode().map(nested)
    return data.batched(4, torch.utils.data.default_collate)


def web_loader(urls, workers):
    return wds.WebLoader(web_data(urls), batch_size=None, num_workers=workers)


def test_workers_pack_what_a_web_dataset_yields(urls, workers):
    with ps.DataLoader(
        web_data(urls), batch_size=None, num_workers=workers, max_bytes="64MiB"
    ) as loader:
        expected = [batch["index"].tolist() for batch in web_loader(urls, workers)]
        for _ in range(2):
            assert [batch["index"].tolist() for batch in loader] == expected
        assert loader.stats().batches == 2 * len(expected) == 8


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
