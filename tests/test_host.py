"""Facts about a host, read from trees of files that stand for machines."""

import os

import pytest

from pinstage import _host
from pinstage._batch import _pack as _packing
from pinstage.inspect._doctor import host_checks

GIB, MIB = 1 << 30, 1 << 20
GPU = "0000:3b:00.0"


@pytest.fixture
def eight_cpus(monkeypatch):
    """Let the process seem to have 8 of 16 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


def test_what_is_not_told_is_none_or_empty(tmp_path):
    assert _host.meminfo("MemTotal", tmp_path) is None
    assert _host.locked_limit(tmp_path) is None
    assert _host.cgroup_memory(tmp_path) == []
    assert _host.cpu_quota(tmp_path) is None
    assert _host.shm_bytes(tmp_path) is None
    assert _host.huge_pages(tmp_path) == ""
    assert _host.numa_nodes(tmp_path) == _host.node_cpus(0, tmp_path) == frozenset()
    assert _host.pci_node(GPU, tmp_path) is None
    assert _host.pci_cpus(GPU, tmp_path) == frozenset()
    assert not _host.is_wsl(tmp_path)
    assert _host.text(tmp_path / "x") == ""
    assert _host.number(tmp_path / "x") is None


# -- CPUs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("1000000 10000\n", 100),
        ("max 100000\n", None),
        ("nonsense\n", None),
        ("1 2 3\n", None),
        ("", None),
        (None, None),
    ],
)
def test_usable_cpus_respect_affinity_and_quota(tree, quota, cpus):
    root = tree({} if quota is None else {"sys/fs/cgroup/cpu.max": quota})
    affinity = len(os.sched_getaffinity(0))
    assert _host.usable_cpus(root) == (affinity if cpus is None else min(cpus, affinity))


@pytest.mark.parametrize(
    ("quota", "threads"), [(None, 8), (100.0, 8), (8.0, 8), (2.5, 2), (2.0, 2), (1.9, 1), (0.5, 1)]
)
def test_fractional_cpus_start_no_thread_except_the_first(quota, threads):
    assert _host.threads_within(8, quota) == threads


V1_OF_ONE_CPU = {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}
V1_UNLIMITED = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
V2_OF_ONE_CPU = {"cpu.max": "100000 100000\n"}
V2_UNLIMITED = {"cpu.max": "max 100000\n"}


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        (
            "0::/job.slice/job",
            {"job.slice/job": V2_UNLIMITED, "job.slice": V2_OF_ONE_CPU, "": V2_UNLIMITED},
        ),
        (
            "0::/job.slice/job",
            {"job.slice/job": V2_OF_ONE_CPU, "job.slice": {"cpu.max": "400000 100000\n"}},
        ),
        ("0::/", {"": V2_OF_ONE_CPU}),
        (
            "4:cpu:/pod/job",
            {"cpu/pod/job": V1_UNLIMITED, "cpu/pod": V1_OF_ONE_CPU, "cpu": V1_UNLIMITED},
        ),
        (
            "4:cpu,cpuacct:/pod/job",
            {"cpu,cpuacct/pod/job": V1_OF_ONE_CPU, "cpu,cpuacct": V1_UNLIMITED},
        ),
        ("4:cpu:/docker/abc", {"cpu": V1_OF_ONE_CPU}),
    ],
    ids=["v2 parent", "v2 own", "v2 container", "v1 parent", "v1 own, joint", "v1 container"],
)
def test_a_quota_of_one_cpu_is_seen_anywhere(tree, eight_cpus, line, groups):
    files = {
        f"sys/fs/cgroup/{group}/{name}": text
        for group, files in groups.items()
        for name, text in files.items()
    }
    root = tree(files | {"proc/self/cgroup": f"{line}\n"})
    assert _packing.usable_cpus(root) == 1
    (check,) = (check for check in host_checks(root, _host.affinity()) if check.name == "CPUs")
    assert check.found.startswith("1 of 16 (8 by affinity, 1 by the control group's quota)")
    assert "Stager(pack_threads=1)" in check.remedy


# -- memory ----------------------------------------------------------------------------------------


def test_memory_and_limits_are_read_in_bytes(tree):
    root = tree(
        {
            "proc/meminfo": "MemTotal:       65843064 kB\nMemAvailable:   64000000 kB\n",
            "proc/self/limits": "Limit  Soft  Hard  Units\nMax locked memory         8388608    8388609    bytes\n",
        }
    )
    assert _host.meminfo("MemTotal", root) == 65843064 * 1024
    assert _host.meminfo("MemAvailable", root) == 64000000 * 1024
    assert _host.locked_limit(root) == 8 * MIB


def test_an_unlimited_lock_is_none(tree):
    root = tree({"proc/self/limits": "Max locked memory  unlimited  unlimited  bytes\n"})
    assert _host.locked_limit(root) is None


def test_every_limited_group_is_listed_own_first(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/pod/slice/container\n",
            "sys/fs/cgroup/pod/slice/container/memory.max": "800\n",
            "sys/fs/cgroup/pod/slice/container/memory.current": "100\n",
            "sys/fs/cgroup/pod/slice/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/slice/memory.max": "max\n",
            "sys/fs/cgroup/pod/slice/memory.current": "100\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.high": "900\n",
            "sys/fs/cgroup/pod/memory.current": "700\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 5\nfile 300\ninactive_file 200\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        }
    )
    assert _host.cgroup_memory(root) == [(800, 700), (900, 400)]
    assert _host.cpu_quota(root) == 2.5


def test_memory_high_is_a_soft_limit_too(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": "16\n",
            "sys/fs/cgroup/job/memory.high": "8\n",
            "sys/fs/cgroup/job/memory.current": "9\n",
        }
    )
    assert _host.cgroup_memory(root) == [(8, -1)]


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/"])
def test_an_invisible_path_reads_the_container_s_root(tree, path):
    root = tree(
        {
            "proc/self/cgroup": f"0::{path}\n",
            "sys/fs/cgroup/memory.max": "16\n",
            "sys/fs/cgroup/memory.current": "8\n",
            "sys/fs/cgroup/cpu.max": "3 1\n",
        }
    )
    assert _host.cgroup_memory(root) == [(16, 8)]
    assert _host.cpu_quota(root) == 3


def test_groups_of_version_1_are_read(tree):
    root = tree(
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert _host.cgroup_memory(root) == [(5000, 3000)]
    assert _host.cpu_quota(root) == 4


def test_groups_of_both_versions_are_read_together(tree):
    job, top = "sys/fs/cgroup/memory/job", "sys/fs/cgroup/memory"
    root = tree(
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            f"{job}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{job}/memory.usage_in_bytes": f"{6 * GIB}\n",
            f"{job}/memory.stat": f"total_inactive_file {2 * GIB}\n",
            f"{top}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{top}/memory.usage_in_bytes": f"{20 * GIB}\n",
            "sys/fs/cgroup/unified/cpu.max": "100000 100000\n",
        }
    )
    assert _host.cgroup_memory(root) == [(8 * GIB, 4 * GIB)]
    assert _host.cpu_quota(root) == 1


def test_the_chosen_word_is_who_gets_huge_pages(tree):
    root = tree({"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"})
    assert _host.huge_pages(root) == "madvise"


# -- nodes, devices and the system -----------------------------------------------------------------


def test_nodes_and_their_cpus_are_read(tree):
    nodes = "sys/devices/system/node"
    root = tree(
        {
            f"{nodes}/online": "0,2-3\n",
            f"{nodes}/node0/cpulist": "0-3,8,10-11\n",
            f"{nodes}/node2/cpulist": "\n",
        }
    )
    assert _host.numa_nodes(root) == {0, 2, 3}
    assert _host.node_cpus(0, root) == {0, 1, 2, 3, 8, 10, 11}
    assert _host.node_cpus(2, root) == frozenset(), "a node of memory alone"


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", None), ("nonsense\n", None)])
def test_a_device_s_node_is_found_by_address(tree, told, node):
    folder = f"sys/bus/pci/devices/{GPU}"
    root = tree({f"{folder}/numa_node": told, f"{folder}/local_cpulist": "8-9\n"})
    assert _host.pci_node(GPU.upper(), root) == node
    assert _host.pci_cpus(GPU.upper(), root) == {8, 9}


def test_wsl_is_known_by_its_kernel(tree):
    assert _host.is_wsl(tree({"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}))


def test_this_machine_answers():
    assert 1 <= _host.usable_cpus() <= len(_host.affinity()) <= os.cpu_count()
    assert 0 < _host.meminfo("MemAvailable") < _host.meminfo("MemTotal")
