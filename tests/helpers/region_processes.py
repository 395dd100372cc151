"""Programs that receive a region by its handle, for `test_handle.py`."""

import torch

import pinstage as ps

MIB = 1 << 20


def use(handle, channel):
    """Write into the region, and keep it until asked to end."""
    region = ps.HostRegion.from_handle(handle, device="cpu")
    region.synchronize(timeout=60)
    tree = region.tree()
    tree["table"][1] = 99
    said = {
        "seen": int(tree["cache"][5]),
        "name": tree["name"],
        "nbytes": region.nbytes,
    }
    channel.send(said)
    channel.recv()


def use_by_rank(rank, handle):
    ps.HostRegion.from_handle(handle, device="cpu").tree()["table"][rank + 1] = rank + 1


def copy_on_device(handle, channel, device, row_bytes):
    """Read all rows on a device, write the last one from there, and keep the region until asked to
    end.
    """
    region = ps.HostRegion.from_handle(handle, device=device)
    region.synchronize(timeout=60)
    rows = region.tensor((region.nbytes // row_bytes, row_bytes // 4), torch.int32)
    with ps.Stager(device, max_bytes="64MiB", borrow_pinned=True) as stager:
        found = int(stager.to_device(rows).sum())
    rows[-1].copy_(torch.full_like(rows[-1], -1, device=device))
    channel.send({"kind": region.kind, "sum": found})
    channel.recv()
