"""What pinstage takes to stage a batch in a training loop, for `pinstage trace` and `pinstage audit`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes a second."""

    fixed_seconds: float  # to stage any batch, whatever is in it
    leaf_seconds: float  # for each leaf
    bytes_per_second: float  # of the bytes: packing and copying overlap
    source: str

    def seconds(self, leaves: int, nbytes: int, bus: float) -> float:
        """Return how long it takes to stage a batch, over a bus of so many bytes a second."""
        return self.fixed_seconds + leaves * self.leaf_seconds + nbytes / min(self.bytes_per_second, bus)


REFERENCE = Cost(250e-6, 0.7e-6, 42e9, source="an H200 with 16 cores")
"""A leaf: by pinstage doctor on one H200; on that of tests/traces/loops it found 0.95 us. The bytes: 16 leaves of
16 MiB in benchmarks/results/staging.json. The fixed part is fitted to an earlier recording of those loops of
tests/traces/loops that are not kept out: 0.2 ms fit best, and a promise errs on the low side. It takes less than 0.1 ms
where batches are staged one after the other, without a training step between them, and least up to 64 KiB."""
