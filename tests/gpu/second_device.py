"""Uses only cuda:1, in every way, and prints after each which of two devices have a context.

It is a separate process, since a context is never removed. The current device is always cuda:0:
this is the harder case, and the case of a program that only writes ``device="cuda:1"``.
"""

import json
import sys
import threading

import torch
from cuda.bindings import driver

import pinstage as ps

DEVICE = torch.device("cuda", 1)
SLEEP_CYCLES = 200_000_000
"""About 0.1 s: long enough that an event after it isn't done when another thread queries it."""


def contexts():
    states = []
    for index in range(2):
        result, device = driver.cuDeviceGet(index)
        assert result == driver.CUresult.CUDA_SUCCESS, result
        result, _, active = driver.cuDevicePrimaryCtxGetState(device)
        assert result == driver.CUresult.CUDA_SUCCESS, result
        states.append(bool(active))
    return states


def in_a_fresh_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def hold_copies(stager):
    """Delay the next copies, without a context on cuda:0."""
    with torch.cuda.device(DEVICE), torch.cuda.stream(stager._target.stream):
        torch.cuda._sleep(SLEEP_CYCLES)


def stages(stager):
    batch = {"x": torch.arange(1000), "y": [torch.ones(3)]}
    for staged in (stager.to_device(batch), *stager.prefetch([batch] * 3)):
        assert staged["x"].device == DEVICE
        assert torch.equal(staged["x"].cpu(), batch["x"])


def fetches(stager):
    there = {"x": torch.ones(1000, device=DEVICE), "y": torch.ones(1 << 20, device=DEVICE)}
    transfer = stager.fetch(there)
    in_a_fresh_thread(transfer.query)
    in_a_fresh_thread(transfer.synchronize)
    assert all((tensor == 1).all() for tensor in transfer.result().values())


def asked_by_other_threads(stager):
    hold_copies(stager)
    transfer = stager.stage({"x": torch.ones(1 << 20)})
    in_a_fresh_thread(stager.stats)
    in_a_fresh_thread(transfer.query)
    in_a_fresh_thread(transfer.synchronize)


def pool_of_nobodys_device():
    with ps.SlabPool(max_bytes="16MiB") as pool, ps.Stager(DEVICE, pool=pool) as stager:
        fetches(stager)
        stages(stager)
        in_a_fresh_thread(stager.close)
        in_a_fresh_thread(pool.trim)


def leases_by_hand(memory):
    with ps.SlabPool("16MiB", memory=memory) as pool:
        there = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        with pool.acquire("1MiB") as lease:
            there.copy_(lease.tensor().fill_(7), non_blocking=True)
        in_a_fresh_thread(pool.stats)
        in_a_fresh_thread(lambda: pool.acquire("1MiB").__exit__(None, None, None))
        assert (there == 7).all()


def loads(workers):
    loader = ps.DataLoader(
        torch.arange(64.0), batch_size=4, num_workers=workers, device=DEVICE, max_bytes="16MiB"
    )
    assert torch.equal(torch.cat([batch.cpu() for batch in loader]), torch.arange(64.0))


def main():
    seen = {}

    def note(way):
        assert torch.cuda.current_device() == 0, way
        seen[way] = contexts()

    torch.cuda.init()
    note("nothing yet")
    loads(2)  # first, so that workers are forked from a process without threads
    note("DataLoader with workers")
    loads(0)
    note("DataLoader without workers")
    with ps.Stager(DEVICE, max_bytes="16MiB") as stager:
        stages(stager)
        note("Stager")
        asked_by_other_threads(stager)
        note("other threads")
        fetches(stager)
        note("fetch")
    note("close")
    for kind in (ps.memory.RegisteredMemory, ps.memory.SharedMemory, ps.memory.HostAllocMemory):
        leases_by_hand(kind(DEVICE))
    note("leases by hand")
    pool_of_nobodys_device()
    note("SlabPool without a device")
    torch.zeros(1, device="cuda:0")
    seen["cuda:0 used"] = contexts()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
