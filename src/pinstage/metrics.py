"""Statistics of pools, for Prometheus. Needs the extra `metrics`: ``pip install
'pinstage[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import PoolStats, SlabPool
from .errors import ForkedPoolError


class PoolCollector(Collector):
    """Reports to Prometheus what pools hold, by owner, and how long owners waited.

    Register it with ``REGISTRY.register(PoolCollector(pool))``. It reads `SlabPool.stats` whenever
    Prometheus collects. For a closed pool it reports the bytes still held; in a forked child it
    reports nothing. A registry takes one `PoolCollector`; `add` further pools to it.

    Args:
        pool: the first pool.
        name: the value of the label ``pool``, which distinguishes the pools.

    Raises:
        TypeError: `pool` is not a `SlabPool`.
    """

    def __init__(self, pool: SlabPool, *, name: str = "default") -> None:
        self._pools: dict[str, SlabPool] = {}
        self.add(pool, name=name)

    def add(self, pool: SlabPool, *, name: str) -> None:
        """Report another pool too.

        Raises:
            TypeError: `pool` is not a `SlabPool`.
            ValueError: another pool has this name.
        """
        if not isinstance(pool, SlabPool):
            raise TypeError(
                f"a PoolCollector needs a SlabPool: {pool!r}; the pool of a Stager is stager.pool"
            )
        if name in self._pools:
            raise ValueError(f"two pools of one name: {name!r}; pass another name=")
        self._pools[name] = pool

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without figures, so that a registry refuses a second collector with
        the same ones.
        """
        return _families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as Prometheus's client asks for them."""
        families = _families()
        for name, pool in self._pools.copy().items():
            try:
                stats = pool.stats()
            except ForkedPoolError:
                continue
            for metric, labels, value in _samples(stats):
                families[f"pinstage_{metric}"].add_metric([name, *labels], value)
        yield from (family for family in families.values() if family.samples)


def _families() -> dict[str, Any]:
    """Return the metrics without figures. Prometheus's formats allow each metric once, with all of
    its samples.
    """
    pool, owner = ["pool"], ["pool", "owner"]
    families = (
        GaugeMetricFamily(
            "pinstage_pool_bytes", "Bytes of slabs that the pool holds.", labels=[*pool, "state"]
        ),
        GaugeMetricFamily(
            "pinstage_pool_slabs", "Slabs that the pool holds.", labels=[*pool, "state"]
        ),
        GaugeMetricFamily("pinstage_pool_max_bytes", "The cap on the bytes held.", labels=pool),
        GaugeMetricFamily(
            "pinstage_pool_peak_bytes", "The most bytes that were held at once.", labels=pool
        ),
        GaugeMetricFamily(
            "pinstage_owner_bytes", "Bytes of slabs in use, by owner.", labels=[*owner, "state"]
        ),
        CounterMetricFamily(
            "pinstage_pool_hits", "Leases served by an existing slab.", labels=pool
        ),
        CounterMetricFamily(
            "pinstage_pool_misses", "Leases that needed an allocation.", labels=pool
        ),
        CounterMetricFamily(
            "pinstage_pool_trims", "Idle slabs given back to the system.", labels=pool
        ),
        CounterMetricFamily(
            "pinstage_owner_waits", "Requests that had to wait, by owner.", labels=owner
        ),
        CounterMetricFamily(
            "pinstage_owner_wait_seconds", "Seconds that requests waited, by owner.", labels=owner
        ),
    )
    return {family.name: family for family in families}


def _samples(stats: PoolStats) -> Iterator[tuple[str, list[str], float]]:
    """Yield the name of each metric, its labels after that of the pool, and its value."""
    for state in ("leased", "in_flight", "free"):
        yield "pool_bytes", [state], getattr(stats, f"{state}_bytes")
        yield "pool_slabs", [state], getattr(stats, f"{state}_slabs")
    yield "pool_max_bytes", [], stats.max_bytes
    yield "pool_peak_bytes", [], stats.peak_held_bytes
    for counter in ("hits", "misses", "trims"):
        yield f"pool_{counter}", [], getattr(stats, counter)
    for owner, figures in stats.owners.items():
        for state in ("leased", "in_flight"):
            yield "owner_bytes", [owner, state], getattr(figures, f"{state}_bytes")
        yield "owner_waits", [owner], figures.waits
        yield "owner_wait_seconds", [owner], figures.wait_seconds


class TorchHostCollector(Collector):
    """Reports to Prometheus what torch's own allocator of page-locked memory holds in this process.

    Reports nothing if this process does not use CUDA.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as Prometheus's client asks for them."""
        stats = torch.cuda.host_memory_stats()
        if not stats:
            return
        held = GaugeMetricFamily(
            "pinstage_torch_host_bytes",
            "Bytes page-locked by torch's host allocator.",
            labels=["state"],
        )
        active = stats.get("active_bytes.current", 0)
        held.add_metric(["active"], active)
        held.add_metric(["cached"], max(0, stats.get("allocated_bytes.current", 0) - active))
        yield held
        for metric, key, text in (
            ("allocations", "num_host_alloc", "Blocks that torch's host allocator page-locked."),
            ("frees", "num_host_free", "Blocks that torch's host allocator gave back."),
        ):
            yield CounterMetricFamily(
                f"pinstage_torch_host_{metric}", text, value=stats.get(key, 0)
            )
