"""Pools of several processes under one `HostBudget`: real processes, some of them killed or
stopped.
"""

import _thread
import contextlib
import errno
import fcntl
import gc
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
from budget_nodes import Node, Nodes
from doubles import (
    CountingMemory,
    interrupts,
    outcome,
    stays_blocked,
    wait_for_waiters,
    wait_until,
)
from host_processes import MIB, crowd

import pinstage as ps
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    HostBudgetError,
    PinstageError,
    PoolClosedError,
)

VARIABLE = "PINSTAGE_BUDGET_DIR"
EVERY_NTH_LINE = int(os.environ.get("EVERY_NTH_LINE", "16"))
"""With 1, a process is killed at each line, else at every second one."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder for this test alone. No living pool may be left in it."""
    path = tmp_path / "budgets"
    monkeypatch.setenv(VARIABLE, str(path))
    yield path
    gc.collect()
    if path.is_dir() and not path.is_symlink() and not path.stat().st_mode & 0o77:
        wait_until(lambda: not held())
        assert not list(path.iterdir())


@pytest.fixture
def process():
    """Another process, which holds 6 MiB of the budget."""
    nodes = Nodes(1)
    node = nodes.start()
    assert node("acquire", "x", 6 * MIB, False)
    yield node
    nodes.end()


def budget(size="8MiB", name="nodes"):
    return ps.HostBudget(size, name=name)


def plain_pool():
    return ps.SlabPool(memory=ps.memory.PageableMemory(), budget=budget())


def lease_all(pool):
    """Lease the whole budget, for which other processes may have to end."""
    pool.acquire("8MiB", timeout=5).release()


def held_when_readable():
    """Return `held`, or None while a row is damaged or the folder can't be used."""
    with contextlib.suppress(HostBudgetError):
        return held()


def held():
    """Return the bytes that each pool of this host holds, in ascending order."""
    found = [*budget().usage(), *budget(name="other").usage()]
    return sorted(usage.held_bytes for usage in found)


@pytest.fixture
def pools(memory):
    made = []

    def make(shared=None, memory=memory, max_bytes="auto"):
        made.append(ps.SlabPool(max_bytes, budget=shared or budget(), memory=memory))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


# -- one cap ---------------------------------------------------------------------------------------


def test_crashing_processes_never_hold_more_than_the_cap(tmp_path):
    found = crowd(tmp_path, 8, 8 * MIB, 6, {"budget": budget(name="crowd")})
    assert (found["excesses"], found["held"], found["ended"]) == (0, 0, [0] * 8)
    assert found["served"] > 20
    assert found["refused"]
    assert found["kills"] > 5
    assert found["peak"] > 4 * MIB


def test_the_watcher_sees_separate_caps(tmp_path):
    assert crowd(tmp_path, 8, 8 * MIB, 2, {"max_bytes": 8 * MIB})["excesses"]


def test_errors_name_the_holders_and_a_larger_budget(process, pools):
    pool = pools()
    with pytest.raises(AcquireTimeoutError) as caught:
        pool.acquire("3MiB", timeout=0.4)
    assert re.search(
        rf"pools of this host had 6\.00 MiB: 6\.00 MiB in process {process.pid} \(\S+\)",
        str(caught.value),
    )
    (size,) = re.findall(
        r'wait longer, or pass budget=HostBudget\("(\d+)MiB", \.\.\.\)$', str(caught.value)
    )
    assert 9 <= int(size) <= 10  # 6 that are held, and 3
    with pytest.raises(
        BudgetExceededError,
        match=r"other pools .* had 6.*; release .*, or pass budget=HostBudget\(",
    ):
        pool.reserve("3MiB")
    process.kill()
    lease_all(pool)
    with pytest.raises(
        BudgetExceededError,
        match=r"name='nodes'\)\), leased 0 B, .*; pass budget=HostBudget\(.11MiB., ",
    ):
        pool.acquire("9MiB")
    assert "other pools" not in pool.stats().max_bytes_reason


def test_budgets_of_different_names_are_independent(pools):
    with (
        pools().acquire("8MiB"),
        pools(budget(name="other")).acquire("8MiB"),
    ):
        assert held() == 2 * [8 * MIB]
        assert [usage.budget for usage in budget().usage()] == ["nodes"]


def test_two_caps_for_one_name_are_refused(process, pools):
    with pytest.raises(
        ValueError,
        match=rf"9437184 bytes here, and 8388608 bytes in process {process.pid} \([^)]+\); give",
    ):
        pools(budget("9MiB"))
    process.kill()
    pools(budget("9MiB"))  # the other cap isn't in use any longer


def test_own_idle_slabs_make_room_before_waiting(pools):
    first, second = pools(), pools()
    with first.acquire("5MiB"):
        second.acquire("1MiB").release()
        second.acquire("2MiB").release()
        with second.acquire("2.5MiB", timeout=0):
            assert second.stats().trims == 2


def test_a_reservation_does_not_wait_for_others(pools):
    first, second = pools(), pools()
    first.acquire("6MiB").release()
    with pytest.raises(
        BudgetExceededError, match=r"reserve does not fit: 3 slabs of 1\.00 MiB are missing"
    ):
        second.reserve("1MiB", count=3)
    assert second.stats().held_bytes == 0
    first.trim()
    second.reserve("1MiB", count=3)
    assert second.stats().free_bytes == 3 * MIB


def test_a_failed_allocation_leaves_the_budget_unchanged(pools, memory):
    first, second = pools(), pools()
    memory.fail_allocate(MemoryError("no more"), nth=2)
    with pytest.raises(MemoryError, match="no more"):
        first.reserve("2MiB", count=3)
    with second.acquire("8MiB", timeout=1):
        pass


def test_blocks_count_with_their_real_size(pools):
    class Generous(CountingMemory):
        def allocate(self, nbytes):
            return super().allocate(2 * nbytes)

    pool = pools(memory=Generous())
    with pool.acquire("2MiB"):
        wait_until(lambda: held() == [4 * MIB])
    pool.trim()
    wait_until(lambda: held() == [0])


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_closed_or_dropped_pool_leaves_no_file(end, memory, folder):
    pool = ps.SlabPool(memory=memory, budget=budget())
    lease = pool.acquire("1MiB")
    if end == "close":
        pool.close()
        assert held() == [MIB]
    else:
        del pool
    lease.release()
    del lease
    wait_until(lambda: not held())
    assert not list(folder.iterdir())


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
def test_interrupts_lose_nothing_of_the_budget(pools):
    first, second = pools(), pools()

    def work():
        with first.acquire("5MiB", timeout=5):
            pass
        first.trim()

    for during in interrupts("_pool/_pool.py", "_waiting.py", step=3, at_least=58):
        first.trim()
        with second.acquire("5MiB", timeout=5):
            pass
        second.trim()
        during(work)
    first.trim()
    lease_all(second)


def test_a_pool_s_cap_binds_within_the_budget(pools):
    first, second = pools(max_bytes="3MiB"), pools()
    assert first.max_bytes == 3 * MIB
    with (
        second.acquire("6MiB"),
        pytest.raises(AcquireTimeoutError, match=r"max_bytes 3\.00 MiB \(given: 3MiB, within Host"),
    ):
        first.acquire("2.5MiB", timeout=0)
    with pytest.raises(BudgetExceededError, match=r'; pass max_bytes="\d+KiB" or more'):
        pools(max_bytes="3MiB").acquire("4MiB")
    second.trim()
    first.reserve("1MiB", count=3)
    assert held() == [0, 0, 3 * MIB]


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [lambda process: process("release", "x"), Node.kill], ids=["a trim", "death"]
)
def test_what_another_process_had_serves_waiting_requests(process, pools, background, end):
    waiting = background(pools().acquire, "8MiB")
    assert stays_blocked(waiting)
    end(process)
    start = time.monotonic()
    outcome(waiting).release()
    assert time.monotonic() - start < 1


class Assassin:
    """Kills this process at a line of `_host_budget`, in whichever thread reaches it.

    Args:
        where: file, line, and the number of the visit; None: only counts.
    """

    def __init__(self, where=None):
        self.where = where
        self.lines = {}

    def __call__(self, frame, event, argument):
        file = os.path.basename(frame.f_code.co_filename)  # noqa: PTH119 - of each call of all threads
        if file not in ("_host_budget.py", "_rows.py"):
            return None
        if event == "line":
            line = (file, frame.f_lineno)
            self.lines[line] = self.lines.get(line, 0) + 1
            if self.where == (*line, self.lines[line]):
                os.kill(os.getpid(), signal.SIGKILL)
        return self

    def during(self, work):
        """Do work, and trace new threads too."""
        start = _thread.start_new_thread

        def traced(function, arguments):
            sys.settrace(self)
            function(*arguments)

        _thread.start_new_thread = lambda function, arguments: start(traced, (function, arguments))
        sys.settrace(self)
        work()
        sys.settrace(None)


def one_life():
    """Grow, wait in vain, shrink, and end."""
    pool = plain_pool()
    pool.acquire("1MiB").release()
    pool.acquire("3MiB", timeout=5).release()
    held()
    with contextlib.suppress(AcquireTimeoutError):
        pool.acquire("7.5MiB", timeout=0.05)
    pool.trim()
    pool.close()
    wait_until(lambda: len(held()) == 1)


def test_a_process_killed_at_any_line_loses_nothing(pools, folder, tmp_path):
    pool = pools()
    found = tmp_path / "lines.json"

    def life(assassin):
        keep = pool.acquire("1MiB", timeout=5)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            try:
                assassin.during(one_life)
                found.write_text(
                    json.dumps([[*line, count] for line, count in assassin.lines.items()])
                )
            finally:
                os._exit(not found.exists())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        keep.release()
        start = time.monotonic()
        with pool.acquire("8MiB", timeout=5):
            assert time.monotonic() - start < 1
        pool.trim()
        assert held() == [0]
        assert len(list(folder.iterdir())) == 1
        return status

    assert life(Assassin()) == 0
    lines = json.loads(found.read_text())
    assert len(lines) > 150
    lines = lines[:: min(2, EVERY_NTH_LINE)]
    nths = itertools.cycle([1, 3])  # not both at each line: that takes a minute
    outcomes = [life(Assassin((file, line, min(count, next(nths))))) for file, line, count in lines]
    # A process that doesn't reach the line a third time survives.
    assert set(outcomes) <= {
        0,
        -signal.SIGKILL,
    }
    assert outcomes.count(-signal.SIGKILL) > 0.9 * len(outcomes)


def test_a_stopped_process_leaves_the_rest_to_others(process, pools):
    os.kill(process.pid, signal.SIGSTOP)
    pool = pools()
    with pool.acquire("2MiB", timeout=0), pytest.raises(AcquireTimeoutError):
        pool.acquire("1MiB", timeout=0.3)
    process.kill()
    lease_all(pool)


# -- the file --------------------------------------------------------------------------------------


def test_folder_and_files_are_the_users_alone(pools, folder):
    pools()
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}
    assert modes == {"": 0o700, ".pinstage": 0o600}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda folder: (folder.mkdir(), folder.chmod(0o755)),
            ", mode 755, not to user .*, mode 700",
        ),
        (
            lambda folder: folder.symlink_to(folder.parent),
            "Not a directory|Too many levels of symbolic links",
        ),
        (lambda folder: folder.write_text(""), "Not a directory"),
        (
            lambda folder: (folder.mkdir(0o700), (folder / "a.pinstage").symlink_to("/etc/passwd")),
            "Too many levels",
        ),
        (lambda folder: (folder.mkdir(0o700), (folder / "a.pinstage").mkdir()), "Is a directory"),
        pytest.param(
            lambda folder: (folder.mkdir(0o700), os.chown(folder, 12345, -1)),
            "it belongs to user 12345",
            marks=pytest.mark.skipif(
                os.geteuid() != 0, reason="only root can give files to others"
            ),
        ),
    ],
    ids=["mode", "linked folder", "no folder", "linked file", "no file", "owner"],
)
def test_hostile_folders_are_refused(folder, wrong, message):
    wrong(folder)
    for use in (budget().usage, plain_pool):
        with pytest.raises(
            HostBudgetError, match=rf"cannot be used: {folder}: .*({message}).*; remove that folder"
        ):
            use()
    (folder.unlink if folder.is_symlink() or folder.is_file() else lambda: shutil.rmtree(folder))()


def test_a_folder_that_cannot_be_made_is_named(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(folder / "deeper"))
    with pytest.raises(HostBudgetError, match=r"No such file or directory: .*deeper.*; remove"):
        plain_pool()


def test_a_relative_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "other")
    for use in (budget().usage, plain_pool):
        with pytest.raises(HostBudgetError, match=r"relative path: 'other': .* absolute path"):
            use()
    assert not list(tmp_path.iterdir())


def test_the_default_folder_is_in_tmp(monkeypatch):
    asked = []
    with monkeypatch.context() as patch:
        patch.delenv(VARIABLE)
        patch.setattr(os.path, "lexists", lambda path: asked.append(str(path)))
        assert budget().usage() == []
    assert asked == [f"/tmp/pinstage-{os.geteuid()}"]


def test_other_files_in_the_folder_stay(pools, folder):
    pools()
    (folder / "mine.json").write_text("{}")
    (folder / "dead.pinstage").write_text("{")
    assert held() == [0]
    assert not (folder / "dead.pinstage").exists()
    (folder / "mine.json").unlink()


DAMAGED = [
    "{",
    "[1]",
    "7",
    "[" * 100_000,
    "{}",
    '{"held_bytes": "many"}',
    '{"held_bytes": -1}',
    '{"held_bytes": true}',
    '{"held_bytes": 1.5}',
    '{"held_bytes": null}',
    '{"max_bytes": "8MiB"}',
    '{"budget": 7}',
    '{"budget": ["held"]}',
    '{"program": {}}',
    '{"pool": null}',
    '{"pid": "7"}',
    '{"shared": [5]}',
    '{"shared": {"7": "5"}}',
    '{"shared": {"7": -5}}',
    '{"shared": {"7": 5}}',  # more than it holds
]


def overwrite(path, text):
    """Write into the file of a row, whose lock its process keeps."""
    with path.open("w") as file:
        file.write(text)


def damage(path, text):
    """Change a field of a row, or replace all of it by a text that isn't an object."""
    if text.startswith('{"'):
        row = path.read_text()
        text = row[:10] + json.dumps(json.loads(row[10:]) | json.loads(text))
    overwrite(path, text)


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:30])
def test_damaged_files_are_errors_that_name_them(pools, folder, text):
    pool = pools()
    [path] = folder.iterdir()
    damage(path, text)
    for use in (budget().usage, pools):
        with pytest.raises(
            HostBudgetError,
            match=rf"file is damaged: {path}: .*; end the process .* \({os.getpid()}\b",
        ):
            use()
    pool.acquire("1MiB").release()  # a pool does not read its own
    assert held() == [MIB]


@pytest.mark.parametrize("text", ['{"held_bytes": "many"}', '{"shared": {"7": 5}}', None])
def test_a_damaged_file_concerns_its_own_budget_alone(pools, folder, text):
    pools()
    [path] = folder.iterdir()
    if text is None:
        overwrite(path, path.read_text()[:70])  # the name can be read, but not the rest
    else:
        damage(path, text)
    other = budget(name="other")
    with pools(other).acquire("8MiB", timeout=5):
        assert [usage.held_bytes for usage in other.usage()] == [8 * MIB]
    with pytest.raises(HostBudgetError, match="damaged"):
        budget().usage()


def test_an_empty_file_counts_nothing(pools, folder):
    pools()
    [path] = folder.iterdir()
    pool = pools()
    overwrite(path, "")
    with pool.acquire("8MiB", timeout=0):
        assert held() == [8 * MIB]


@contextlib.contextmanager
def full_disk(written=0):
    """Let the kernel write no file beyond some bytes, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("written", [0, 100])
def test_a_full_disk_keeps_no_new_file(pools, folder, written):
    pool, kept = pools(), []
    before = list(folder.iterdir())
    with full_disk(written):
        for _ in range(3):
            with pytest.raises(HostBudgetError, match=f"cannot be used: {folder}") as caught:
                pools(budget(name="other"))
            kept.append(caught.value)  # as `sys.last_value` is
    assert list(folder.iterdir()) == before
    lease_all(pool)


@pytest.mark.parametrize("written", [0, 100])
def test_a_full_disk_keeps_a_row_s_numbers(pools, memory, written):
    pool, other = pools(), pools()
    pool.acquire("2MiB").release()
    with full_disk(written):
        with pytest.raises(HostBudgetError, match="cannot be used"):
            pool.acquire("4MiB", timeout=5)
        assert memory.live_bytes == pool.stats().held_bytes == 2 * MIB
        assert held() == [0, 2 * MIB]
        pool.trim()  # frees its slabs anyway
        assert memory.live_bytes == 0
        assert held() == [0, 2 * MIB]
    lease_all(other)


def test_a_disk_full_amid_rows_takes_no_slab(pools, monkeypatch):
    pool = pools(memory=ps.memory.SharedMemory(register=False))  # a row for each slab
    pwrite, left = os.pwrite, [2]

    def write(file, text, offset):
        left[0] -= 1
        return pwrite(file, text, offset) if left[0] >= 0 else 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(HostBudgetError, match="No space left"):
            pool.reserve("1MiB", count=3)
    assert sum(held()) == pool.stats().held_bytes == 0
    pool.reserve("1MiB", count=3)
    assert held() == [3 * MIB]


def test_rows_never_grow(pools, folder):
    pool = pools(budget("1TiB", name="x" * 300))
    [path] = folder.iterdir()
    sizes = {path.stat().st_size}
    for nbytes in (1, 1000, 3 * MIB):
        pool.acquire(nbytes).release()
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1


def test_fields_of_other_versions_are_ignored(pools, folder):
    pools()
    [path] = folder.iterdir()
    text = json.dumps(json.loads(path.read_bytes()[10:]) | {"mood": "good"}).encode()
    path.write_bytes(b"%010d" % zlib.crc32(text) + text)
    assert held() == [0]


def test_refused_requests_keep_their_place_in_line(pools, background):
    first, second = pools(), pools()
    lease = first.acquire("8MiB")
    requests = []
    for number in (1, 2, 3):
        requests.append(background(second.acquire, "6MiB", timeout=20))
        wait_for_waiters(second, number)
    time.sleep(0.3)  # each tries several times
    lease.release()
    first.trim()
    for request in requests:  # another one would hold the bytes
        outcome(request).release()


def test_small_requests_never_overtake_a_refused_one(pools, background):
    first, second = pools(), pools()
    leases = [first.acquire("1MiB") for _ in range(8)]
    requests = []
    for number, size in enumerate(["4MiB", *["1MiB"] * 4], 1):
        requests.append(background(second.acquire, size, timeout=20))
        wait_for_waiters(second, number)
    for _ in range(3):
        leases.pop().release()
        first.trim()
        time.sleep(0.2)  # each tries several times
    assert not any(request.done() for request in requests)
    leases.pop().release()
    first.trim()
    lease = outcome(requests[0])
    for other in leases:
        other.release()
    first.trim()
    for request in requests[1:]:
        outcome(request).release()
    lease.release()


def test_a_removed_folder_is_made_again(pools, folder):
    first = pools()
    lease = first.acquire("6MiB")
    shutil.rmtree(folder)
    first.acquire("1MiB").release()  # until a pool grows or shrinks, others don't know of it
    assert held() == [7 * MIB]
    second = pools()
    with pytest.raises(AcquireTimeoutError):
        second.acquire("3MiB", timeout=0)
    lease.release()
    first.trim()
    lease_all(second)


def test_a_locked_folder_fails_only_the_request(pools, folder, monkeypatch):
    pool = pools()
    pool.acquire("2MiB").release()
    with locked(folder, monkeypatch):
        with pytest.raises(
            HostBudgetError, match=r"another process has held its lock for 0\.05 s: is it stopped\?"
        ):
            pool.acquire("4MiB")
        pool.trim()  # frees its slabs anyway
    lease_all(pool)


def test_too_many_open_files_end_no_other_pool(pools, monkeypatch):
    first, second = pools(), pools()
    open_ = os.open

    def open_few(path, flags, *more, **options):
        if str(path).endswith(".pinstage"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_(path, flags, *more, **options)

    with first.acquire("6MiB"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_few)
            with pytest.raises(HostBudgetError, match="Too many open files"):
                second.acquire("6MiB", timeout=0.05)
        assert held() == [0, 6 * MIB]


# -- the argument ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "name", "message"),
    [
        ("much", "nonsense", "not a size: 'much'"),
        ("auto", "nonsense", "not a size: 'auto'"),
        (0, "nonsense", "max_bytes is too small: 0"),
        ("64", "nonsense", "max_bytes is too small: '64'"),
        (1.5, "nonsense", "not a whole number of bytes"),
        ("1GiB", "", "a budget's name must be text: ''"),
        ("1GiB", 7, "a budget's name must be text: 7"),
    ],
)
def test_a_budget_of_nonsense_is_refused(size, name, message):
    with pytest.raises(ValueError, match=message):
        ps.HostBudget(size, name=name)


def test_a_budget_is_a_plain_picklable_value():
    one = ps.HostBudget("64GiB", name="job7")
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == "HostBudget('64.00 GiB', name='job7')"
    assert (
        len({one, ps.HostBudget(64 << 30, name="job7"), ps.HostBudget("64GiB", name="job8")}) == 2
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stager_and_a_loader_share_a_budget(workers):
    options = {"num_workers": workers, "max_bytes": "2MiB", "budget": budget(), "device": "cpu"}
    loader = ps.DataLoader(torch.arange(8.0), 2, **options)
    assert len(list(loader)) == 4
    with ps.Stager("cpu", budget=budget()) as stager:
        stager.to_device(torch.ones(MIB)[::2])
        assert len(held()) == 2
        assert (loader.stats().pool.max_bytes, stager.stats().pool.max_bytes) == (2 * MIB, 8 * MIB)


def test_importing_pinstage_makes_no_folder(folder):
    assert budget().usage() == []
    assert not folder.exists()


def test_only_growing_freeing_and_waiting_open_the_folder(pools, folder, monkeypatch):
    looks, open_ = [], os.open

    def note(path, *args, **options):
        looks.extend([path] * (path == folder))
        return open_(path, *args, **options)

    monkeypatch.setattr(os, "open", note)
    first, second = pools(), pools()
    first.acquire("1MiB").release()
    with first.acquire("6MiB"):
        looks.clear()
        first.acquire("1MiB").release()
        time.sleep(0.3)
        assert looks == []
        with pytest.raises(AcquireTimeoutError):
            second.acquire("3MiB", timeout=0.5)
        assert 2 <= len(looks) <= 12  # every 50 ms


@contextlib.contextmanager
def held_lock(folder):
    """Hold the folder's lock, as another process would."""
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        yield
    finally:
        os.close(other)


@contextlib.contextmanager
def locked(folder, monkeypatch):
    """Hold the folder's lock, for which this process soon stops waiting."""
    with monkeypatch.context() as patch, held_lock(folder):
        patch.setattr("pinstage._pool._rows._BUSY_SECONDS", 0.05)
        yield


@pytest.mark.parametrize("use", ["usage", "wait"])
def test_interrupts_leave_the_folder_unlocked(pools, folder, use):
    first, second = pools(), pools()

    def wait():
        with contextlib.suppress(AcquireTimeoutError):
            second.acquire("3MiB", timeout=0.06)

    files = ("_pool/_host_budget.py", "_pool/_pool.py", "_reaper.py", "contextlib.py")
    with first.acquire("6MiB"):
        for during in interrupts(*files, step=2, at_least=15):
            during(budget().usage if use == "usage" else wait)
            with held_lock(folder):
                pass


def test_a_passing_error_ends_no_waiting_request(pools, folder, waiting, monkeypatch):
    first, second = pools(), pools()
    lease = first.acquire("6MiB")
    request = waiting(second, "3MiB", timeout=20)
    with locked(folder, monkeypatch):
        assert stays_blocked(request)
    lease.release()
    first.trim()
    outcome(request).release()


def test_an_unusable_folder_ends_no_waiting_request(pools, folder, waiting):
    first, second = pools(), pools()
    leases = [first.acquire("4MiB"), second.acquire("4MiB")]
    requests = [waiting(second, "4MiB", timeout=20) for _ in range(2)]
    with wrong_mode(folder):
        time.sleep(0.2)  # the first one tries several times
        assert not requests[0].done()
        leases.pop().release()  # a lease of an idle slab needs no folder
        lease = outcome(requests[0])
    leases.pop().release()
    first.trim()
    outcome(requests[1]).release()
    lease.release()


def test_closing_while_growing_says_so(pools, folder, background):
    pool = pools()
    with held_lock(folder):
        growing = background(pool.acquire, "1MiB", timeout=5)
        assert stays_blocked(growing)
        pool.close()
    with pytest.raises(PoolClosedError):
        outcome(growing)
    wait_until(lambda: not held())


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_deadline_counts_while_another_has_the_folder(pools, folder, timeout):
    pool = pools()
    pool.acquire("2MiB").release()
    with held_lock(folder):
        began = time.monotonic()
        with pytest.raises(AcquireTimeoutError, match=f"another process had the lock of {folder}"):
            pool.acquire("4MiB", timeout=timeout)
        assert timeout <= time.monotonic() - began < timeout + 1
        time.sleep(0.1)  # the pool may look again
        pool.acquire("512KiB", timeout=timeout).release()  # idle slabs serve
    pool.acquire("4MiB", timeout=5).release()
    with pytest.raises(AcquireTimeoutError) as caught, pool.acquire("4MiB"):
        pool.acquire("5MiB", timeout=0)
    assert "lock" not in str(caught.value)


def test_waiting_for_the_folder_delays_no_other_deadline(pools, folder, background):
    first, second = pools(), pools()
    with held_lock(folder):
        waiting = background(first.acquire, "4MiB")  # for as long as it takes
        assert stays_blocked(waiting)
        began = time.monotonic()
        with pytest.raises(AcquireTimeoutError):
            second.acquire("2MiB", timeout=0.2)
        assert time.monotonic() - began < 1
    outcome(waiting).release()


def test_trimming_many_slabs_hardly_waits_for_the_folder(pools, folder):
    pool = pools()
    pool.reserve("64KiB", count=60)
    with held_lock(folder):
        began = time.monotonic()
        pool.trim()
        assert time.monotonic() - began < 1
    wait_until(lambda: held() == [0])


@contextlib.contextmanager
def failing(monkeypatch, name):
    """Let a function of `os` fail; the first call does its work nevertheless."""
    function, calls = getattr(os, name), itertools.count()

    def fail(*arguments):
        if next(calls) == 0:
            function(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@contextlib.contextmanager
def wrong_mode(folder):
    folder.chmod(0o755)
    yield
    folder.chmod(0o700)


OBSTACLES = {
    "another process has the folder": lambda folder, _: held_lock(folder),
    "the folder has a wrong mode": lambda folder, _: wrong_mode(folder),
    "writing fails": lambda _, monkeypatch: failing(monkeypatch, "pwrite"),
}


@pytest.fixture(params=OBSTACLES)
def obstacle(request, folder, monkeypatch):
    """A context in which the rows of this process can't be written."""
    return lambda: OBSTACLES[request.param](folder, monkeypatch)


def test_leases_after_a_hindered_close_aren_t_counted(pools, obstacle):
    pool = pools()
    lease = pool.acquire("3MiB")
    with obstacle():
        pool.close()
    lease.release()
    wait_until(lambda: held_when_readable() == [])


def test_bytes_freed_behind_an_obstacle_are_given_back(pools, obstacle):
    pool = pools()
    pool.acquire("3MiB").release()
    with obstacle():
        pool.trim()
    wait_until(lambda: held_when_readable() == [0])


def test_a_row_is_right_again_after_growing_failed(pools, obstacle):
    pool = pools()
    with pool.acquire("2MiB"):
        with obstacle(), pytest.raises((HostBudgetError, AcquireTimeoutError)):
            pool.acquire("3MiB", timeout=0)
        wait_until(lambda: held_when_readable() == [2 * MIB])


def test_dropped_pools_aren_t_counted_behind_obstacles(memory, obstacle):
    pool = ps.SlabPool(memory=memory, budget=budget())
    pool.acquire("3MiB").release()
    with obstacle():
        del pool
        gc.collect()
        wait_until(lambda: memory.live_bytes == 0)
    wait_until(lambda: held_when_readable() == [])


def test_rows_end_although_closing_a_file_fails(pools, monkeypatch):
    pool = pools(memory=ps.memory.SharedMemory(register=False))  # a row for each slab
    pool.reserve("1MiB", count=3)
    close = os.close

    def close_and_fail(file):
        is_row = ".pinstage" in str(Path(f"/proc/self/fd/{file}").readlink())
        close(file)
        if is_row:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_and_fail)
        pool.trim()
    assert held() == [0]


def test_a_failed_free_makes_no_endless_growth(pools, memory):
    first, second = pools(), pools()
    first.acquire("4MiB").release()
    memory.fail_deallocate(OSError("it cannot be freed"))
    with pytest.raises(OSError, match="it cannot be freed"):
        first.trim()
    with second.acquire("6MiB", timeout=0), pytest.raises(AcquireTimeoutError):
        first.acquire("3MiB", timeout=0.3)
    [stuck] = [block for block in memory.live_blocks if block.nbytes == 4 * MIB]
    memory.deallocate(stuck)


def test_a_closed_pool_leaves_although_memory_fails(pools, memory):
    pool = pools()
    budget = pool._state.memory._budget
    pool.acquire(MIB).release()
    [stuck] = memory.live_blocks
    memory.fail_deallocate(OSError("it cannot be freed"))
    with pytest.raises(OSError, match="it cannot be freed"):
        pool.close()
    assert budget.usage() == []
    memory.deallocate(stuck)


def test_a_finaliser_among_the_files_can_only_close(pools, monkeypatch):
    pool, other, list_ = pools(), pools(), os.listdir

    def collected_there(folder):
        with pytest.raises(PinstageError, match="in the middle of a call of the same thread"):
            pool.acquire(MIB)  # has to grow: another thread writes its file
        other.close()
        return list_(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", collected_there)
        budget().usage()
    with pytest.raises(PoolClosedError):
        other.acquire(MIB)
    pool.acquire(MIB).release()
