"""What pools hold and do, for Prometheus. Needs the extra `metrics`: ``pip install 'pinstage[metrics]'``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import PoolStats, SlabPool
from .errors import ForkedPoolError


class PoolCollector(Collector):
    """Reports to Prometheus what a pool holds, who holds it, and who waited.

    Register it by ``REGISTRY.register(PoolCollector(pool))``. It reads `SlabPool.stats` when Prometheus asks. For a
    closed pool it reports what is still held; in a forked child it reports nothing.

    Args:
        pool: the pool.
        name: the label ``pool`` of each of its metrics, which distinguishes the pools of one registry.
    """

    def __init__(self, pool: SlabPool, *, name: str = "default") -> None:
        self._pool = pool
        self._name = name

    def describe(self) -> Iterable[Metric]:
        """Return nothing: several pools may be in one registry, under the same names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as Prometheus's client asks for them."""
        try:
            stats = self._pool.stats()
        except ForkedPoolError:
            return
        yield from _of_pool(stats, self._name)
        yield from _of_owners(stats, self._name)


def _of_pool(stats: PoolStats, name: str) -> Iterator[Metric]:
    held = GaugeMetricFamily("pinstage_pool_bytes", "Bytes of slabs that the pool holds.", labels=["pool", "state"])
    slabs = GaugeMetricFamily("pinstage_pool_slabs", "Slabs that the pool holds.", labels=["pool", "state"])
    for state in ("leased", "in_flight", "free"):
        held.add_metric([name, state], getattr(stats, f"{state}_bytes"))
        slabs.add_metric([name, state], getattr(stats, f"{state}_slabs"))
    yield held
    yield slabs
    for metric, text, value in (
        ("max_bytes", "The cap on the bytes held.", stats.max_bytes),
        ("peak_bytes", "The most bytes that were held at once.", stats.peak_held_bytes),
    ):
        gauge = GaugeMetricFamily(f"pinstage_pool_{metric}", text, labels=["pool"])
        gauge.add_metric([name], value)
        yield gauge
    for metric, text, value in (
        ("hits", "Leases served by a slab that was there.", stats.hits),
        ("misses", "Leases that needed an allocation.", stats.misses),
        ("trims", "Idle slabs given back to the system.", stats.trims),
        ("leased_bytes", "Bytes of slabs that were leased.", stats.total_leased_bytes),
    ):
        counter = CounterMetricFamily(f"pinstage_pool_{metric}", text, labels=["pool"])
        counter.add_metric([name], value)
        yield counter


def _of_owners(stats: PoolStats, name: str) -> Iterator[Metric]:
    labels = ["pool", "owner"]
    held = GaugeMetricFamily("pinstage_owner_bytes", "Bytes of slabs in use, by owner.", labels=[*labels, "state"])
    waits = CounterMetricFamily("pinstage_owner_waits", "Requests that had to wait, by owner.", labels=labels)
    seconds = CounterMetricFamily("pinstage_owner_wait_seconds", "Seconds that they waited, by owner.", labels=labels)
    for owner, figures in stats.owners.items():
        held.add_metric([name, owner, "leased"], figures.leased_bytes)
        held.add_metric([name, owner, "in_flight"], figures.in_flight_bytes)
        waits.add_metric([name, owner], figures.waits)
        seconds.add_metric([name, owner], figures.wait_seconds)
    yield from (held, waits, seconds)


class TorchHostCollector(Collector):
    """Reports to Prometheus what torch's own allocator of page-locked memory holds in this process.

    Reports nothing if this process does not use CUDA, or if torch is too old.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as Prometheus's client asks for them."""
        stats = _torch_host_stats()
        if not stats:
            return
        held = GaugeMetricFamily("torch_host_bytes", "Bytes page-locked by torch's host allocator.", labels=["state"])
        active = stats.get("active_bytes.current", 0)
        held.add_metric(["active"], active)
        held.add_metric(["cached"], max(0, stats.get("allocated_bytes.current", 0) - active))
        yield held
        for metric, key, text in (
            ("allocations", "num_host_alloc", "Blocks that torch's host allocator page-locked."),
            ("frees", "num_host_free", "Blocks that torch's host allocator gave back."),
        ):
            yield CounterMetricFamily(f"torch_host_{metric}", text, value=stats.get(key, 0))


def _torch_host_stats() -> dict[str, Any]:
    ask = getattr(torch.cuda, "host_memory_stats", None)
    if ask is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found: dict[str, Any] = ask()
    return found
