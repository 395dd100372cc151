"""A paged cache of keys and values: blocks go to the host when the device is full, and return when
they are needed.

    python examples/paged_cache.py                              # small; on the CPU without a GPU
    python examples/paged_cache.py --host 48GiB --device cuda:0

A serving engine keeps the keys and values of a conversation in blocks. The host's part is a
`ps.HostRegion`, one block per row. It is usable at once, and page-locked in the background while
the engine starts. The script repeats this with a page-locked torch tensor, and compares the time
until the first swap and until all blocks are ready, the resident memory, and the longest delay of
another thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import pinstage as ps
from pinstage import HostRegion

MIB, GIB = 1 << 20, 1 << 30


class PagedCache:
    """Blocks of keys and values on a device, and a larger number of them on the host.

    Args:
        device: where the model is.
        host: [host blocks, *shape], page-locked if the device is a GPU.
        device_blocks: how many blocks fit on the device.
    """

    def __init__(self, device: torch.device, host: torch.Tensor, device_blocks: int) -> None:
        self.host = host
        self.there = torch.zeros((device_blocks, *host.shape[1:]), dtype=host.dtype, device=device)
        # Blocks are read in place.
        self._stager = ps.Stager(device, max_bytes="256MiB", borrow_pinned=True)

    def swap_out(self, blocks: dict[int, int]) -> None:
        """Copy device blocks to host blocks, by number; return when the copies are done."""
        self._stager.to_host(
            [self.there[i] for i in blocks], out=[self.host[j] for j in blocks.values()]
        )

    def swap_in(self, blocks: dict[int, int]) -> None:
        """Copy host blocks to device blocks, by number, in the order of the device's current
        stream.
        """
        self._stager.to_device(
            [self.host[i] for i in blocks], out=[self.there[j] for j in blocks.values()]
        )

    def close(self) -> None:
        """Free the stager's slabs."""
        self._stager.close()


class Bar:
    """Shows how much of a region is page-locked, the rate and the remaining time."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self, ready: int, nbytes: int) -> None:
        """Draw the bar again; called from the region's thread."""
        rate = ready / max(time.perf_counter() - self._began, 1e-9)
        done = "#" * (30 * ready // nbytes)
        left = (nbytes - ready) / rate
        end = "\n" if ready == nbytes else ""
        sys.stderr.write(
            f"\r[{done:<30}] {ready / GIB:.2f} GiB, {rate / GIB:.1f} GiB/s, {left:.1f} s left {end}"
        )
        sys.stderr.flush()


def make_region(device: torch.device, shape: Sequence[int]) -> tuple[torch.Tensor, HostRegion]:
    """Return the host's blocks in a region, and the region. The CPU can use the blocks at once."""
    row = math.prod(shape[1:]) * torch.bfloat16.itemsize
    region = HostRegion(shape[0] * row, row_bytes=row, device=device, progress=Bar())
    return region.tensor(tuple(shape), torch.bfloat16), region


def make_pinned(device: torch.device, shape: Sequence[int]) -> tuple[torch.Tensor, None]:
    """Return the host's blocks in a torch tensor, page-locked if the device is a GPU."""
    return torch.zeros(tuple(shape), dtype=torch.bfloat16, pin_memory=device.type == "cuda"), None


def swap(cache: PagedCache, rounds: int, among: int) -> float:
    """Swap random blocks out to the first host blocks and back in; check that none has changed.

    Returns:
        The seconds that the swaps took, until the blocks were on the device again.
    """
    chance, number, seconds = random.Random(0), 0, 0.0
    for _ in range(rounds):
        ids = chance.sample(range(len(cache.there)), len(cache.there) // 2)
        homes = dict(zip(ids, chance.sample(range(among), len(ids)), strict=True))
        for i in ids:
            number = (number + 1) % 256
            cache.there[i].fill_(number)
        expected = cache.there.clone()
        wait(cache.there.device)
        began = time.perf_counter()
        cache.swap_out(homes)
        seconds += time.perf_counter() - began
        cache.there[ids] = 0
        wait(cache.there.device)
        began = time.perf_counter()
        cache.swap_in({j: i for i, j in homes.items()})
        wait(cache.there.device)
        seconds += time.perf_counter() - began
        if not torch.equal(cache.there, expected):
            raise AssertionError("a block changed during a swap")
    return seconds


def wait(device: torch.device) -> None:
    """Wait for all work of the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def resident() -> int:
    """Return the resident bytes of this process, explicit huge pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "HugetlbPages"))
    )


class Heartbeat(threading.Thread):
    """Another thread of the engine, which keeps launching kernels; records the longest launch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.longest, self._device, self._over = 0.0, device, threading.Event()

    def run(self) -> None:
        """Launch kernels until the block ends."""
        ones = torch.ones(1024, device=self._device)
        ones.add_(1)
        while not self._over.wait(0.0005):
            began = time.perf_counter()
            ones.add_(1)
            self.longest = max(self.longest, time.perf_counter() - began)

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def measure(
    make: Callable[[torch.device, Sequence[int]], tuple[torch.Tensor, HostRegion | None]],
    device: torch.device,
    shape: Sequence[int],
    device_blocks: int,
    rounds: int,
) -> dict[str, Any]:
    """Make a cache, swap, and return the figures."""
    before, began = resident(), time.perf_counter()
    with Heartbeat(device) as heartbeat:
        host, region = make(device, shape)
        cache = PagedCache(device, host, device_blocks)
        swap(cache, 1, among=device_blocks)  # needs only the first host blocks
        first = time.perf_counter() - began
        if region is not None:
            region.synchronize()
        last = time.perf_counter() - began
    found = {
        "host_bytes": host.nbytes,
        "resident_bytes": resident() - before,
        "first_swap_seconds": first,
        "all_ready_seconds": last,
        "longest_launch_ms": heartbeat.longest * 1e3,
        "swap_gb_per_s": 2
        * rounds
        * (device_blocks // 2)
        * host[0].nbytes
        / swap(cache, rounds, len(host))
        / 1e9,
    }
    cache.close()
    if region is not None:
        region.close()
    return found


def main() -> None:
    """Measure both kinds of memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--host", default="64MiB", help="size of the cache on the host, such as 48GiB"
    )
    parser.add_argument("--block", default="1MiB", help="size of a block, all layers included")
    parser.add_argument("--device-blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    block, host = (ps.HostBudget(size, name="sizes").max_bytes for size in (args.block, args.host))
    # Blocks of keys and values, each [tokens * heads, 128].
    shape = (
        host // block,
        2,
        block // 2 // 128 // 2,
        128,
    )
    torch.ones(1, device=device)
    results = {}
    for name, make in (("HostRegion", make_region), ("torch, page-locked", make_pinned)):
        results[name] = measure(make, device, shape, args.device_blocks, args.rounds)
        print(f"{name}:", ", ".join(f"{key} {value:,.4g}" for key, value in results[name].items()))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
