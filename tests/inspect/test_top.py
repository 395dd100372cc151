"""`pinstage top`: the holders of a `HostBudget`, in text, in JSON and on a terminal."""

import json
import os
import re
import signal
import sys

import pytest
from processes import terminal

import pinstage as ps
from pinstage.inspect import _checks, _top
from pinstage.inspect._doctor import diagnose


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PINSTAGE_BUDGET_DIR", str(tmp_path / "budgets"))


@pytest.fixture
def two_pools():
    job, own = ps.HostBudget("8MiB", name="job7"), ps.HostBudget("1GiB", name="eval")
    memory = ps.memory.PageableMemory()
    with ps.SlabPool(budget=job, memory=memory) as first, ps.SlabPool(budget=own, memory=memory):
        first.reserve("1MiB")
        with first.acquire("5MiB"):
            yield


def test_text_has_a_line_per_pool(two_pools, capsys):
    assert _top.run_top(once=True, as_json=False) == 0
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "HostBudget eval: 0 B of 1.00 GiB in 1 pool\n" in text
    assert "HostBudget job7: 6.00 MiB of 8.00 MiB in 1 pool\n" in text
    assert re.search(rf"\n{os.getpid()} \S+ 6.00 MiB\n", text)


def test_json_has_bytes(two_pools, capsys):
    assert _top.run_top(once=False, as_json=True) == 0
    own, job = json.loads(capsys.readouterr().out)["budgets"]
    assert (own["name"], own["max_bytes"], own["held_bytes"]) == ("eval", 1 << 30, 0)
    assert (job["name"], job["held_bytes"]) == ("job7", 6 << 20)
    [pool] = job["pools"]
    assert (pool["pid"], pool["held_bytes"]) == (os.getpid(), 6 << 20)


def test_without_a_budget_it_says_so(capsys):
    _top.run_top(once=False, as_json=False)
    assert capsys.readouterr().out == "no pool on this host has a HostBudget\n"


@pytest.mark.usefixtures("interruptible")
def test_a_terminal_is_drawn_anew_until_an_interrupt(two_pools):
    shown = b""
    with terminal([sys.executable, "-m", "pinstage", "top"]) as (main, process):
        while shown.count(b"job7") < 2:
            shown += os.read(main, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    text = shown.decode(errors="replace")
    assert "─" in text or "+--" in text  # as the locale's encoding allows


@pytest.mark.parametrize(
    ("pools", "status", "words"),
    [
        ([], "ok", "no pool has one"),
        ([ps.PoolUsage("j", 1 << 30, 1, "a", "k", 1 << 20)], "info", "1.00 MiB of 1.00 GiB"),
        ([ps.PoolUsage("j", 1 << 20, 7, "a", "k", 1 << 30)], "warning", "['j'] is exceeded"),
    ],
)
def test_doctor_judges_budgets(pools, status, words):
    check = _checks.host_budgets(pools)
    assert check.status == status
    assert words in check.found + check.remedy


def test_doctor_sums_them_up(two_pools):
    (check,) = (check for check in diagnose(measuring=False).checks if check.name == "host budgets")
    assert "job7: 6.00 MiB of 8.00 MiB" in check.found


def test_a_shared_region_counts_once(folder):
    region = ps.HostRegion(
        "6MiB", shared=True, budget=ps.HostBudget("8MiB", name="job7"), device="cpu"
    )
    with region, ps.HostRegion.from_handle(region.handle(), device="cpu"):
        usage = ps.HostBudget("8MiB", name="job7").usage()
        assert [pool.held_bytes for pool in usage] == [6 << 20] * 2
        assert "HostBudget job7: 6.00 MiB of 8.00 MiB in 2 pools" in _top.as_text(
            _top.sections(usage)
        )
        assert _top.to_dict(usage)["budgets"][0]["held_bytes"] == 6 << 20
        assert _checks.host_budgets(usage)[1:3] == ("info", "job7: 6.00 MiB of 8.00 MiB")
