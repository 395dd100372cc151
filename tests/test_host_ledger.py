"""The file of a `HostBudget`: it is the user's alone, or it is refused."""

import os

import pytest

from pinstage import HostBudget, PageableMemory, SlabPool
from pinstage._pool import _host_ledger
from pinstage.errors import HostBudgetError


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
