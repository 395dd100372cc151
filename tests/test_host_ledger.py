"""The file of a `HostBudget`: it is the user's alone, or it is refused."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from pinstage import HostBudget, PageableMemory, SlabPool
from pinstage._pool import OwnerStats, _host_budget, _host_ledger
from pinstage.errors import AcquireTimeoutError, HostBudgetError
from pinstage.inspect import _top
from pinstage.inspect._report import as_text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    monkeypatch.setenv(_host_ledger.VARIABLE, str(path))
    return path


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda folder, file: (folder.mkdir(), folder.chmod(0o755)), "its mode 755 lets others in"),
        (lambda folder, file: folder.symlink_to(folder.parent), "it is no folder, or a link"),
        (lambda folder, file: folder.write_text(""), "it is no folder"),
        (lambda folder, file: (folder.mkdir(0o700), file.symlink_to("/etc/passwd")), "it is a link, or no file"),
        (lambda folder, file: (folder.mkdir(0o700), file.mkdir()), "it is a link, or no file"),
        (lambda folder, file: (folder.mkdir(0o700), file.touch(), file.chmod(0o644)), "its mode 644 lets others in"),
        (
            lambda folder, file: (folder.mkdir(0o700), file.touch(0o600), (folder / "b").hardlink_to(file)),
            "it is a link, or no file",
        ),
        (
            lambda folder, file: (folder.mkdir(0o700), file.touch(0o600), file.write_text("no database" * 100)),
            "cannot be used: .* file is not a database; if no program uses it, remove",
        ),
    ],
    ids=["folder's mode", "linked folder", "no folder", "linked file", "no file", "file's mode", "hard link", "broken"],
)
def test_what_others_could_have_made_or_read_is_refused(folder, wrong, message):
    wrong(folder, _host_ledger._file())
    with pytest.raises(HostBudgetError, match=message) as raised:
        SlabPool(PageableMemory(), max_bytes=HostBudget("8MiB"))
    assert str(folder) in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_folder_of_another_user_is_refused(folder):
    folder.mkdir(0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(HostBudgetError, match="it is of user 12345, and this is user 0"):
        SlabPool(PageableMemory(), max_bytes=HostBudget("8MiB"))


def test_a_folder_that_cannot_be_made_is_named(folder, monkeypatch):
    monkeypatch.setenv(_host_ledger.VARIABLE, str(folder / "deeper"))
    with pytest.raises(HostBudgetError, match=r"no folder for the host's ledger: .*deeper: No such file or directory"):
        SlabPool(PageableMemory(), max_bytes=HostBudget("8MiB"))


def test_without_a_word_of_the_user_the_folder_is_named_after_them(monkeypatch):
    monkeypatch.delenv(_host_ledger.VARIABLE, raising=False)
    assert str(_host_ledger._file().parent) == f"/tmp/pinstage-{os.geteuid()}"


def test_a_pool_that_ends_between_two_steps_of_waking_it_is_dead(folder, monkeypatch):
    folder.mkdir(0o700)
    bell = _host_ledger.Bell(folder / "a.pipe")
    assert _host_ledger.ring(folder / "a.pipe", b"!")
    open_ = os.open

    def open_and_end(*arguments):
        pipe = open_(*arguments)
        bell.close()
        return pipe

    monkeypatch.setattr(os, "open", open_and_end)
    assert not _host_ledger.ring(folder / "a.pipe", b"!")


def test_waking_a_pool_that_does_not_read_never_waits(folder):
    folder.mkdir(0o700)
    with _host_ledger.Bell(folder / "a.pipe"):
        assert all(_host_ledger.ring(folder / "a.pipe", b"!" * 4096) for _ in range(100))


# -- asked for shares, by programs and by `pinstage top`


@pytest.fixture
def pool(folder):
    with SlabPool(PageableMemory(), max_bytes=HostBudget("8MiB", name="job")) as pool:
        yield pool


@pytest.fixture
def change_row(pool):
    """Change the row of a pool, which does not answer then, so that the change stays."""

    def change(column, value):
        with _host_ledger.transaction() as entries:
            entries._db.execute(f"UPDATE pools SET {column} = ?", (value,))
            entries.commit()

    return change


def shares(monkeypatch):
    """Ask for shares, but no pool how it is: it would write its row."""
    with monkeypatch.context() as patch:
        patch.setattr(_host_budget, "_ANSWER_SECONDS", 0)
        patch.setattr(_host_budget, "ring", lambda path, message: True)
        return HostBudget.shares()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("told", "{", "Expecting property name"),
        ("told", "[" * 100_000, "recursion"),
        ("told", "[1]", "'list' object has no attribute 'get'"),
        ("told", '{"at": "now"}', "could not convert string"),
        ("told", '{"waits": "often"}', "waits is 'often'"),
        ("told", '{"free_bytes": null}', "free_bytes is None"),
        ("told", '{"wait_seconds": Infinity}', "wait_seconds is inf"),
        ("told", '{"owners": {"eval": 5}}', "'int' object has no attribute 'get'"),
        ("told", '{"owners": {"eval": {"waits": []}}}', r"waits is \[\]"),
        ("told", b"\x80", "a field has the wrong type"),
        ("bytes", "many", "a field has the wrong type"),
        ("budget", b"job", "a field has the wrong type"),
    ],
)
def test_a_damaged_row_is_an_error_that_names_it(pool, change_row, monkeypatch, column, value, message):
    change_row(column, value)
    try:
        with pytest.raises(
            HostBudgetError, match=rf"is damaged: .*sqlite: row .*: .*{message}.*; if no program uses it"
        ):
            shares(monkeypatch)
    finally:
        change_row(column, {"told": "{}", "bytes": 0, "budget": "job"}[column])


def test_fields_of_another_version_are_ignored(pool, change_row, monkeypatch):
    owner = '{"held_bytes": 7, "at_most": null, "mood": "good"}'
    change_row("told", f'{{"free_bytes": 5, "pid": 1, "mood": [], "owners": {{"eval": {owner}}}}}')
    (share,) = shares(monkeypatch)
    assert (share.pid, share.free_bytes, share.leased_bytes) == (os.getpid(), 5, 0)
    assert share.owners["eval"]["held_bytes"] == 7
    assert share.owners["eval"].keys() == set(OwnerStats.__slots__)
    assert share.owners["eval"]["at_most"] is None
    text = as_text(_top.sections([dataclasses.replace(share, answered=True)]))
    assert "eval" in text


def test_a_folder_that_cannot_be_read_is_an_error_of_the_ledger(folder, monkeypatch):
    def lstat(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lstat)
        patch.setattr(Path, "stat", lstat)
        with pytest.raises(HostBudgetError, match=r"cannot be trusted: .*Permission denied"):
            HostBudget.shares()


def test_a_relative_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_host_ledger.VARIABLE, "ledger")
    for use in (HostBudget.shares, lambda: SlabPool(PageableMemory(), max_bytes=HostBudget("8MiB"))):
        with pytest.raises(HostBudgetError, match=r"relative path: 'ledger': .* absolute path"):
            use()
    assert not list(tmp_path.iterdir())


# -- who is alive


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_pool_that_cannot_be_asked_is_alive(folder, monkeypatch, code):
    open_ = os.open

    def open_few(path, flags, *more):
        if str(path).endswith(".pipe") and flags & os.O_WRONLY:
            raise OSError(code, os.strerror(code))
        return open_(path, flags, *more)

    budget = HostBudget("64MiB", name="job")
    with SlabPool(PageableMemory(), max_bytes=budget) as first, SlabPool(PageableMemory(), max_bytes=budget) as second:
        with first.acquire("40MiB"):
            pipes = set(folder.glob("*.pipe"))
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", open_few)
                with pytest.raises(AcquireTimeoutError):
                    second.acquire("60MiB", timeout=0.05)
                assert sorted(share.nbytes for share in HostBudget.shares()) == [0, 40 << 20]
            assert set(folder.glob("*.pipe")) == pipes
        second.acquire("60MiB", timeout=20).release()
