"""Ray Data and Ray Train on a real cluster on this machine, which the tests start and stop."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import torch
import train_ray
from programs import environment
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn
from train_ray import Nested

import pinstage as ps
from pinstage.integrations.ray import StageBatches

WAYS = ["pinstage", "plain", "loader", "plain-loader"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, environment()["PYTHONPATH"]]))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else ray leaves a token in the home directory
        with train_ray.cluster():
            yield


# -- Ray Train -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """The reports of two workers, by way."""
    out = tmp_path_factory.mktemp("ray")
    train_ray.fit(WAYS, 2, "8MiB", out)
    return {
        way: [json.loads((out / way / f"rank{rank}.json").read_text()) for rank in range(2)]
        for way in WAYS
    }


@pytest.mark.parametrize(("ours", "plain"), [("pinstage", "plain"), ("loader", "plain-loader")])
def test_two_workers_train_to_ray_s_losses(trained, ours, plain):
    for rank in range(2):
        assert trained[ours][rank]["losses"] == trained[plain][rank]["losses"]
        assert trained[ours][rank]["samples"] == trained[plain][rank]["samples"]
        assert len(trained[ours][rank]["losses"]) == trained[ours][rank]["batches"] == 16
    assert trained[ours][0]["losses"] != trained[ours][1]["losses"]


# -- Ray Data --------------------------------------------------------------------------------------


@ray.remote
class Reader:
    """Reads its shard in its own process."""

    def read(self, stage, shard, passes=1):
        found = []
        for _ in range(passes):
            for batch in stage.iter_torch_batches(shard, batch_size=4, collate_fn=Nested()):
                assert isinstance(batch["measured"]["signal"], torch.Tensor)
                found += batch["index"].tolist()
        return os.getpid(), found, stage.stats().batches, stage.stats().pool.max_bytes


def test_two_processes_stage_a_split_dataset(cluster):
    shards = ray.data.from_items(train_ray.rows(32), override_num_blocks=4).streaming_split(
        2, equal=True
    )
    stage = StageBatches(max_bytes="4MiB")
    assert isinstance(stage.stager, ps.Stager)  # of this process: each reader makes its own
    readers = [Reader.remote() for _ in shards]
    pending = [
        reader.read.remote(stage, shard, 2) for reader, shard in zip(readers, shards, strict=True)
    ]
    (one, first, *counted), (other, second, *too) = ray.get(pending)
    assert len({one, other, os.getpid()}) == 3
    assert sorted(first + second) == sorted(2 * list(range(32)))
    assert counted == too == [8, 4 << 20]


@pytest.fixture(scope="module")
def dataset(cluster):
    # Otherwise blocks, and batches that threads collate, may come in any order on busy CPUs.
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    return (
        ray.data.range(20).map(lambda row: {"id": row["id"], "half": row["id"] / 2}).materialize()
    )


def test_without_collation_each_column_is_a_tensor(dataset):
    stage = StageBatches("cpu")
    plain = list(dataset.iterator().iter_torch_batches(batch_size=8))
    ours = list(stage.iter_torch_batches(dataset.iterator(), batch_size=8))
    assert [len(batch["id"]) for batch in ours] == [8, 8, 4]
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert stage.stats().batches == 3
    assert stage.stats().copies == 6


@pytest.mark.parametrize(
    ("base", "kind"),
    [(ArrowBatchCollateFn, pa.Table), (PandasBatchCollateFn, pd.DataFrame)],
    ids=["arrow", "pandas"],
)
def test_a_collate_function_can_return_any_structure(dataset, base, kind):
    class Collate(base):
        def __call__(self, batch):
            assert isinstance(batch, kind)
            numbers = torch.tensor(np.asarray(batch["id"]))
            return [numbers, {"ragged": [torch.ones(i) for i in range(3)]}]

    stage = StageBatches("cpu")
    for number, batch in enumerate(
        stage.iter_torch_batches(dataset, batch_size=10, collate_fn=Collate())
    ):
        assert batch[0].tolist() == list(range(10 * number, 10 * number + 10))
        assert [len(part) for part in batch[1]["ragged"]] == [0, 1, 2]
    assert stage.stats().batches == 2


def test_a_plain_function_is_refused(dataset):
    with pytest.raises(TypeError, match="make it a NumpyBatchCollateFn, ArrowBatchCollateFn or"):
        next(StageBatches("cpu").iter_torch_batches(dataset, collate_fn=lambda batch: batch))


def test_leaving_a_loop_early_returns_every_slab(dataset):
    stage = StageBatches("cpu", max_bytes="1MiB")
    for batch in stage.iter_torch_batches(dataset, batch_size=2, prefetch_batches=3):
        assert batch["id"].tolist() == [0, 1]
        break
    assert len(list(stage.iter_torch_batches(dataset, batch_size=2))) == 10
    assert stage.stats().pool.leased_slabs == 0


def test_options_reach_the_stager_and_ray(dataset):
    stage = StageBatches("cpu", max_bytes="1MiB", depth=3, keep_on_host="['nothing']")
    with pytest.raises(Exception, match="leads to nothing"):
        next(iter(stage.iter_torch_batches(dataset)))
    asked = []

    class Shard:
        def iter_torch_batches(self, **options):
            asked.append(options["prefetch_batches"])
            return []

    assert (
        list(stage.iter_torch_batches(Shard()))
        == list(stage.iter_torch_batches(Shard(), prefetch_batches=1))
        == []
    )
    assert asked == [3, 1]
