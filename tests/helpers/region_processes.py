"""What processes do that get a region by its handle, for `test_handle.py`."""

import pinstage as ps

MIB = 1 << 20


def use(handle, channel):
    """Write into the region, and keep it until told to end."""
    region = ps.HostRegion.from_handle(handle, device="cpu")
    region.synchronize(timeout=60)
    tree = region.tree()
    tree["table"][1] = 99
    said = {"seen": int(tree["cache"][5]), "ends": region._chunks.ends, "name": tree["name"], "nbytes": region.nbytes}
    channel.send(said)
    channel.recv()


def use_by_rank(rank, handle):
    ps.HostRegion.from_handle(handle, device="cpu").tree()["table"][rank + 1] = rank + 1
