"""Which NUMA node host memory should be on.

A host with several sockets has several nodes, and a GPU hangs on one of them: copies from the other node's memory cross
the link between the sockets. Pages come to a node in two ways, both used: a policy for the mapping (`_pages.prefer`),
and threads of that node that touch it first, which is all that is left where a container forbids the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from .. import _host

Asked = int | Literal["auto"] | None


class Placement(NamedTuple):
    """Where pages shall be."""

    node: int | None
    """The node; None: wherever the kernel puts them."""
    cpus: frozenset[int]
    """Which of the process's CPUs belong to it; empty where none does."""
    reason: str
    """Why there, or why nowhere in particular."""


ANYWHERE = Placement(None, frozenset(), "no NUMA node was asked for")


def check(asked: Asked) -> Asked:
    """Return the argument if it can be a node, else raise ``ValueError``."""
    if asked is None or asked == "auto" or (type(asked) is int and asked >= 0):
        return asked
    raise ValueError(
        f"numa_node must be a node's number, 'auto' or None: {asked!r}; see /sys/devices/system/node/online"
    )


def placement(asked: Asked, pci_address: str, root: Path = Path("/")) -> Placement:
    """Say where pages for a device shall be.

    Args:
        asked: a node, or ``"auto"`` for the device's.
        pci_address: of the device, as in ``"0000:1b:00.0"``; only read for ``"auto"``.
        root: where ``sys`` is.

    Raises:
        ValueError: there are several nodes, and none of that number.
    """
    if asked is None:
        return ANYWHERE
    nodes = _host.numa_nodes(root)
    if len(nodes) < 2:
        return Placement(None, frozenset(), f"numa_node={asked!r}: this host has one NUMA node, nothing to do")
    if asked == "auto":
        node = _host.pci_node(pci_address, root)
        if node is None:
            return Placement(None, frozenset(), f"numa_node='auto': the system does not tell the node of {pci_address}")
        reason = f"node {node}, that of {pci_address}"
    else:
        node, reason = asked, f"node {asked}, as asked"
    if node not in nodes:
        raise ValueError(
            f"numa_node={asked!r}: no node {node} on this host, which has {sorted(nodes)}; pass one of these"
        )
    cpus = _host.node_cpus(node, root) & _host.affinity()
    return Placement(node, cpus, reason if cpus else f"{reason} (this process may use none of its CPUs)")
