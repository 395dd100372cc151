"""Figures of pools in Prometheus's format, read by its own parser."""

import re

import pytest
import torch
from doubles import ManualEvent, claim_in_child
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import pinstage
from pinstage.metrics import PoolCollector, TorchHostCollector


@pytest.fixture
def registry():
    return CollectorRegistry()


def read(registry):
    """Return each sample by its name and labels."""
    families = parse(generate_latest(registry).decode())
    order = ("pool", "owner", "state")
    samples = [sample for family in families for sample in family.samples]
    return {
        (s.name, *(s.labels[label] for label in order if label in s.labels)): s.value
        for s in samples
    }


def parsed_strictly(registry):
    """Return the families, by a parser that raises errors."""
    return list(parse_openmetrics(generate_openmetrics(registry).decode()))


FIGURES = """\
pinstage_pool_bytes{pool="training",state="leased"} 104.0
pinstage_pool_bytes{pool="training",state="in_flight"} 208.0
pinstage_pool_bytes{pool="training",state="free"} 320.0
pinstage_pool_slabs{pool="training",state="leased"} 1.0
pinstage_pool_slabs{pool="training",state="in_flight"} 1.0
pinstage_pool_slabs{pool="training",state="free"} 1.0
pinstage_pool_max_bytes{pool="training"} 1000.0
pinstage_pool_peak_bytes{pool="training"} 632.0
pinstage_owner_bytes{owner="loader",pool="training",state="leased"} 104.0
pinstage_owner_bytes{owner="loader",pool="training",state="in_flight"} 0.0
pinstage_owner_bytes{owner="checkpoint",pool="training",state="leased"} 0.0
pinstage_owner_bytes{owner="checkpoint",pool="training",state="in_flight"} 208.0
pinstage_pool_hits_total{pool="training"} 0.0
pinstage_pool_misses_total{pool="training"} 2.0
pinstage_pool_trims_total{pool="training"} 0.0
pinstage_owner_waits_total{owner="loader",pool="training"} 0.0
pinstage_owner_waits_total{owner="checkpoint",pool="training"} 0.0
pinstage_owner_wait_seconds_total{owner="loader",pool="training"} 0.0
pinstage_owner_wait_seconds_total{owner="checkpoint",pool="training"} 0.0
"""


def test_the_figures_are_those_of_the_pool(pool, registry):
    registry.register(PoolCollector(pool, name="training"))
    event = ManualEvent()
    lease = pool.acquire(100, owner="loader")
    pool.acquire(200, owner="checkpoint").release(after=event)
    pool.reserve(300)
    shown = generate_latest(registry).decode().splitlines()
    assert sorted(line for line in shown if line[0] != "#") == sorted(FIGURES.splitlines())
    lease.release()
    event.finish()
    assert read(registry)["pinstage_pool_bytes", "training", "free"] == 632


def test_names_and_units_are_those_of_prometheus(pool, registry):
    registry.register(PoolCollector(pool))
    pool.acquire(100, owner='a "strange"\nowner').release()
    families = parsed_strictly(registry)
    assert len(families) == 10
    for family in families:
        assert re.fullmatch(r"pinstage_(pool|owner)_[a-z_]+", family.name)
        assert family.type in ("gauge", "counter")
        assert family.documentation.endswith(".")
        assert all(
            s.name == family.name + ("_total" if family.type == "counter" else "")
            for s in family.samples
        )


def test_pools_are_told_apart_by_name(make_pool, registry):
    pools = [make_pool(), make_pool()]
    collector = PoolCollector(pools[0], name="training")
    registry.register(collector)
    collector.add(pools[1], name="evaluation")
    for pool in pools:
        pool.acquire(100, owner="loader").release()
    found = read(registry)
    assert {found["pinstage_pool_max_bytes", name] for name in ("training", "evaluation")} == {1000}
    parsed_strictly(registry)
    with pytest.raises(ValueError, match="two pools of one name: 'training'; pass another name="):
        collector.add(pools[1], name="training")


def test_a_registry_refuses_a_duplicate_collector(make_pool, registry):
    registry.register(PoolCollector(make_pool(), name="training"))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(PoolCollector(make_pool(), name="evaluation"))


def test_a_stager_instead_of_its_pool_is_refused():
    with (
        pinstage.Stager("cpu") as stager,
        pytest.raises(
            TypeError, match=r"needs a SlabPool: <Stager .*; the pool of a Stager is stager\.pool"
        ),
    ):
        PoolCollector(stager)


def test_a_forked_child_reports_nothing(pool, registry):
    registry.register(PoolCollector(pool))

    def claim():
        assert list(registry.collect()) == []

    claim_in_child(claim)


def test_a_closed_pool_tells_what_is_still_held(pool, registry):
    registry.register(PoolCollector(pool))
    with pool.acquire(100):
        pool.close()
        assert read(registry)["pinstage_pool_bytes", "default", "leased"] == 104
    assert read(registry)["pinstage_pool_bytes", "default", "leased"] == 0


def test_what_torch_page_locks_stands_beside_it(registry, monkeypatch):
    figures = {
        "allocated_bytes.current": 4096,
        "active_bytes.current": 1024,
        "num_host_alloc": 3,
        "num_host_free": 1,
    }
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: figures)
    registry.register(TorchHostCollector())
    assert read(registry) == {
        ("pinstage_torch_host_bytes", "active"): 1024,
        ("pinstage_torch_host_bytes", "cached"): 3072,
        ("pinstage_torch_host_allocations_total",): 3,
        ("pinstage_torch_host_frees_total",): 1,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda_nothing_is_said_of_torch(registry):
    registry.register(TorchHostCollector())
    assert read(registry) == {}
