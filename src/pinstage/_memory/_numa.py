"""The NUMA node that host memory should be on.

A host with several sockets has several nodes, and each GPU is attached to one of them: copies from
another node's memory cross the link between the sockets. Two methods place pages on a node, and
both are used: a policy for the mapping (`_pages.prefer`), and threads of that node that touch the
pages first. If a container forbids the policy, only the threads are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from .. import _host

Asked = int | Literal["auto"] | None


class Placement(NamedTuple):
    """The placement of pages."""

    node: int | None
    """The node; None leaves it to the kernel."""
    cpus: frozenset[int]
    """The CPUs of the process that belong to the node; empty if there are none."""
    reason: str
    """Why this node was chosen, or none."""


ANYWHERE = Placement(None, frozenset(), "no NUMA node was asked for")


def check(asked: Asked) -> Asked:
    """Return the argument if it can be a node, else raise ``ValueError``."""
    if asked is None or asked == "auto" or (type(asked) is int and asked >= 0):
        return asked
    raise ValueError(
        f"numa_node must be a node's number, 'auto' or None: {asked!r}; see "
        "/sys/devices/system/node/online"
    )


def placement(asked: Asked, pci_address: str, root: Path = Path("/")) -> Placement:
    """Return where pages for a device should be.

    Args:
        asked: a node, or ``"auto"`` for the device's.
        pci_address: the device's, such as ``"0000:1b:00.0"``; only read for ``"auto"``.
        root: where ``sys`` is.

    Raises:
        ValueError: there are several nodes, and none has that number.
    """
    if asked is None:
        return ANYWHERE
    nodes = _host.numa_nodes(root)
    if len(nodes) < 2:
        return Placement(
            None, frozenset(), f"numa_node={asked!r}: this host has one NUMA node, nothing to do"
        )
    if asked == "auto":
        node = _host.pci_node(pci_address, root)
        if node is None:
            return Placement(
                None,
                frozenset(),
                f"numa_node='auto': the system doesn't report the node of {pci_address}",
            )
        reason = f"node {node}, that of {pci_address}"
    else:
        node, reason = asked, f"node {asked}, as asked"
    if node not in nodes:
        raise ValueError(
            f"numa_node={asked!r}: no node {node} on this host, which has {sorted(nodes)}; pass "
            "one of these"
        )
    cpus = _host.node_cpus(node, root) & _host.affinity()
    return Placement(
        node, cpus, reason if cpus else f"{reason} (this process may use none of its CPUs)"
    )
