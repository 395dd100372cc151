"""The NUMA node that host memory should be on.

A host with several sockets has several nodes, and each GPU is attached to one of them: copies from
another node's memory cross the link between the sockets. Two methods place pages on a node, and
both are used: threads of that node touch the pages first, and a policy for the mapping
(`_pages.prefer`) says the same to the kernel. Containers may forbid the policy, not the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from .. import _host
from . import _cuda, _pages

Asked = int | Literal["auto"] | None


class Placement(NamedTuple):
    """The placement of pages."""

    node: int | None
    """The node for the mapping's policy; None for no policy."""
    cpus: frozenset[int]
    """The CPUs of the process that belong to the node; empty if there are none."""
    reason: str
    """Why this node was chosen, or none."""


def _anywhere(reason: str) -> Placement:
    return Placement(None, frozenset(), reason)


ANYWHERE = _anywhere("no NUMA node was asked for")


def check(asked: Asked) -> Asked:
    """Return the argument if it can be a node, else raise ``ValueError``."""
    if asked is None or asked == "auto" or (type(asked) is int and asked >= 0):
        return asked
    raise ValueError(
        f"numa_node must be a node's number, 'auto' or None: {asked!r}; see "
        "/sys/devices/system/node/online"
    )


def device_node(index: int, root: Path = Path("/")) -> int | None:
    """Return the node of host memory that is nearest to a device; None if it is unknown.

    The driver knows it, or else sysfs. ``CU_DEVICE_ATTRIBUTE_NUMA_ID`` and NVML's number are other
    nodes: on Grace they are the GPU's own memory.
    """
    node = _cuda.attribute(index, "HOST_NUMA_ID")
    return node if node >= 0 else _host.pci_node(_cuda.pci_address(index), root)


def placement(
    asked: Asked, find_node: Callable[[], int | None], root: Path = Path("/")
) -> Placement:
    """Return where pages for a device should be.

    The cases, in this order:

    1. none was asked for, or the host has fewer than two nodes with CPUs: nothing is done;
    2. the process has a memory policy, for example by ``numactl``: it is kept, and nothing is done;
    3. "auto", and the device's node is unknown, or the process may use none of its CPUs: likewise;
    4. otherwise the node's CPUs touch the pages, and the mapping prefers the node where the
       process is known to have no policy.

    Args:
        asked: a node, or ``"auto"`` for the device's.
        find_node: returns the device's node; only called for ``"auto"``.
        root: where ``sys`` is.

    Raises:
        ValueError: this host has no node with CPUs of that number.
    """
    if asked is None:
        return ANYWHERE
    nodes = _nodes_with_cpus(root)
    if nodes and asked != "auto" and asked not in nodes:
        raise ValueError(
            f"numa_node={asked!r}: no node {asked} with CPUs on this host, which has "
            f"{sorted(nodes)}; pass one of these"
        )
    if len(nodes) < 2:
        return _anywhere(f"numa_node={asked!r}: this host has one NUMA node, nothing to do")
    policy = _pages.memory_policy()
    if policy:
        return _anywhere("this process has a memory policy (numactl), which is kept")
    node, reason = (find_node(), "the device's") if asked == "auto" else (asked, "as asked")
    if node not in nodes:
        return _anywhere(f"numa_node='auto': the system doesn't report the device's node: {node}")
    cpus = _host.node_cpus(node, root) & _host.affinity()
    if not cpus:
        if asked == "auto":
            return _anywhere(f"this process may use none of the CPUs of node {node}, the device's")
        reason += " (this process may use none of its CPUs)"
    return Placement(node if policy == 0 else None, cpus, f"node {node}, {reason}")


def _nodes_with_cpus(root: Path) -> set[int]:
    return {node for node in _host.numa_nodes(root) if _host.node_cpus(node, root)}
