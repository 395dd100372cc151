import pytest

from pinstage._memory._limits import auto_max_bytes, most_bytes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def host(tree):
    """Write files of a fake root, which has 64 GiB, 40 of them available."""
    tree(
        {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {40 << 20} kB\n"}
    )
    return tree


def cgroup(folder, **sizes):
    files = {f"sys/fs/cgroup/{folder}/memory.{name}": str(size) for name, size in sizes.items()}
    return files | {"proc/self/cgroup": "0::/slice/job\n"}


AVAILABLE = "40.00 GiB available (memory available on this machine)"


@pytest.mark.parametrize(
    ("files", "cap", "reason"),
    [
        ({}, 10 * GIB, AVAILABLE),
        (
            cgroup("slice/job", max=60 * GIB, high="max", current=GIB)
            | cgroup("slice", max=16 * GIB, current=4 * GIB),
            3 * GIB,
            "12.00 GiB available (cgroup headroom)",
        ),
        (
            cgroup("slice/job", max=GIB, current=GIB + 4096),
            1 << 20,
            "0 B available (cgroup headroom), raised to the least useful 1.00 MiB",
        ),
        (
            {
                "proc/self/limits": "Limit Soft Limit Hard Limit Units\nMax locked memory         "
                "67108864             67108864      bytes\n"
            },
            10 * GIB,
            AVAILABLE,
        ),
        (
            {"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"},
            GIB // 4,
            "1.00 GiB available (limit of WSL2)",
        ),
    ],
    ids=["memory", "least headroom", "a full cgroup", "a limit that doesn't bind CUDA", "WSL"],
)
def test_the_cap_is_a_quarter_of_available_memory(host, files, cap, reason):
    assert auto_max_bytes(root=host(files)) == (cap, f"25% of {reason}")


def test_ranks_of_this_host_share_the_cap(host, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cap, reason = auto_max_bytes(root=host({}))
    assert cap == 10 * GIB // 4
    assert reason.endswith(", divided by 4 local ranks")


def test_without_readable_limits_a_stated_amount_is_assumed(tmp_path):
    cap, reason = auto_max_bytes(root=tmp_path)
    assert cap == GIB // 4
    assert "assumed" in reason
    assert most_bytes(tmp_path)[0] == 1 << 63


def test_total_memory_is_the_smaller_limit(host):
    assert most_bytes(host({})) == (64 * GIB, "memory of this machine")
    root = host(cgroup("slice/job", max=16 * GIB, current=15 * GIB))
    assert most_bytes(root) == (16 * GIB, "limit of this cgroup")


def test_this_machine_gives_an_answer_with_a_reason():
    cap, reason = auto_max_bytes()
    assert 1 << 20 <= cap <= most_bytes()[0] // 4
    assert reason.startswith("25% of ")


@pytest.mark.parametrize("ranks", ["", "two", "0", "-1", "1.5"])
def test_an_impossible_number_of_ranks_is_an_error(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(
        ValueError, match=r"must be 1 or more: .*set it to the number of ranks on this host"
    ):
        auto_max_bytes()
