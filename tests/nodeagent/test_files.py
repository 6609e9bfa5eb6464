"""What the agent and the shim keep on disk: ledger, log bounds and tails, identities, locks."""

import errno
import os
from pathlib import Path

import pytest

from nodeagent.ledger import Ledger, LedgerEntry, write_atomically
from nodeagent.logtail import log_tail
from nodeagent.runtime import runtime_dir
from springtide.data_dir import lock_data_dir
from springtide.errors import AlreadyExists, FailedPrecondition
from springtide.log_file import bound_log
from springtide.model.desired import EngineLaunch
from springtide.model.enums import Want
from springtide.model.worker import ExitInfo
from springtide.processes import ProcessIdentity

ENTRY = LedgerEntry(
    worker_id="w-1",
    pool="p",
    store_id="s",
    generation=3,
    want=Want.DRAIN,
    launch=EngineLaunch("sim", "m", "m", 2, ("0", "1"), ("--x",), {"A": "b"}),
    incarnation=7,
    live=True,
    gpu_ids=("0", "1"),
    memory_before={"0": 5},
    shim=ProcessIdentity("boot", 12, 34),
    exit=ExitInfo(code=1, reason="ENGINE_EXITED"),
)


def test_round_trip(tmp_path: Path) -> None:
    """What is written is what is read, and nobody else can read it."""
    ledger = Ledger(tmp_path / "workers")
    ledger.write(ENTRY)
    assert list(ledger.read_all()) == [ENTRY]
    assert (ledger.folder("w-1") / "ledger.json").stat().st_mode & 0o077 == 0
    ledger.forget("w-1")
    assert list(ledger.read_all()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"worker_id": "w-1"}', b'{"worker_id": "other"}', b"\xff\xfe", b'{"want": 3}'],
)
def test_unreadable_entries_are_put_aside(tmp_path: Path, content: bytes) -> None:
    """Never fatal, and the readable ones are still found."""
    ledger = Ledger(tmp_path / "workers")
    ledger.write(ENTRY)
    bad = ledger.folder("w-0")
    bad.mkdir()
    (bad / "ledger.json").write_bytes(content)
    assert list(ledger.read_all()) == [ENTRY]
    assert (bad / "ledger.json.corrupt").read_bytes() == content
    assert list(ledger.read_all()) == [ENTRY]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle of a write is an error, and the entry of before is still whole."""
    ledger = Ledger(tmp_path / "workers")
    ledger.write(ENTRY)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nodeagent.ledger.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.write(ENTRY)
    assert list(ledger.read_all()) == [ENTRY]


def test_folders_of_forgotten_workers_are_bounded(tmp_path: Path) -> None:
    """Logs stay until fifty newer ones push them out."""
    ledger = Ledger(tmp_path)
    for i in range(60):
        (tmp_path / f"old-{i}").mkdir()
        os.utime(tmp_path / f"old-{i}", (i, i))
    ledger.forget("old-59")
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {f"old-{i}" for i in range(10, 60)}


def test_log_tail(tmp_path: Path) -> None:
    """At most 4 KiB of whole lines; nothing for a log that is not there."""
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_text("".join(f"line {i} {'x' * 100}\n" for i in range(1000)))
    tail = log_tail(path)
    assert len(tail.encode()) <= 4096
    assert tail.splitlines()[0].startswith("line ")
    assert tail.endswith("line 999 " + "x" * 100)
    path.write_bytes("ä".encode() * 5000)
    assert 0 < len(log_tail(path).encode()) <= 4096


def test_logs_are_bounded_in_place(tmp_path: Path) -> None:
    """The writer keeps its file open and appends; the newest lines are kept."""
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"".join(b"%06d\n" % i for i in range(1000)))
        assert not bound_log(path, 7000)
        writer.write(b"last\n")
        assert bound_log(path, 7000)
        writer.write(b"after\n")
    lines = path.read_bytes().splitlines()
    assert lines[-2:] == [b"last", b"after"]
    assert path.stat().st_size < 4000


def test_one_agent_per_folder(tmp_path: Path) -> None:
    """The lock names its holder and goes with it."""
    held = lock_data_dir(tmp_path, "nodeagent.lock", "agent")
    with pytest.raises(AlreadyExists, match=str(os.getpid())):
        lock_data_dir(tmp_path, "nodeagent.lock", "agent")
    os.close(held)
    os.close(lock_data_dir(tmp_path, "nodeagent.lock", "agent"))


def test_runtime_folder_is_private(tmp_path: Path) -> None:
    """Others cannot look in; what is no folder is refused."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    assert runtime_dir(str(folder), "m").stat().st_mode & 0o077 == 0
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(FailedPrecondition, match="runtime_dir"):
        runtime_dir(str(link), "m")


def test_atomic_write_leaves_no_other_file(tmp_path: Path) -> None:
    """Only the file itself is there afterwards."""
    write_atomically(tmp_path / "f", b"x")
    write_atomically(tmp_path / "f", b"y")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"y"
