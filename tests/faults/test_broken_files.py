"""Files that are damaged, half written or not ours: said clearly, put aside where that is safe, nothing doubled.

CP10 NA11, F15 F34: ledger, launch file, shim's runtime file, the store, folders that cannot be written.
"""

import contextlib
import json
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from springtide.v1 import types_pb2 as t
from tests.faults.blows import FaultStack, wait_for
from tests.faults.conftest import TIMING

DAMAGE = {
    "half": lambda content: content[: len(content) // 2],
    "another type": lambda content: b"[]",
    "deep": lambda content: b"[" * 200_000,
    "another worker": lambda content: content.replace(b"demo-1", b"demo-9"),
    "fields of odd types": lambda content: json.dumps({**json.loads(content), "incarnation": "x", "live": 7}).encode(),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_damaged_ledger(stack: FaultStack) -> None:
    """Put aside and said; its processes are strays and end; the worker is started again, once."""
    stack.pool()
    for name, damage in DAMAGE.items():
        worker = stack.workers("ACTIVE")[0]
        old = stack.engine_process(worker.worker_id)
        ledger = stack.folder / "agent" / "workers" / worker.worker_id / "ledger.json"
        stack.kill("nodeagent")
        ledger.write_bytes(damage(ledger.read_bytes()))
        stack.start("nodeagent")
        wait_for(f"the end of the old engine ({name})", partial(_has_ended, old), 40)
        wait_for(f"a new engine ({name})", partial(_another, stack, worker), 40)
        assert "LEDGER_CORRUPT" in stack.log("nodeagent")
        stack.check_whole(active=1)
    assert stack.ask().exact


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running()


def _another(stack: FaultStack, old: t.Worker) -> bool:
    return any(w.incarnation != old.incarnation for w in stack.workers("ACTIVE"))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_damaged_files_that_only_tell(stack: FaultStack) -> None:
    """launch.json and shim.json of a running worker, and leftovers of writes that were cut: adoption needs none."""
    stack.pool()
    worker = stack.workers("ACTIVE")[0]
    engine = stack.engine_process(worker.worker_id)
    folder = stack.folder / "agent" / "workers" / worker.worker_id
    stack.kill("nodeagent")
    (folder / "launch.json").write_text("{")
    (folder / "shim.json").unlink()
    (folder / ".ledger.json.new").write_text("{")
    (folder.parent / "stray-file").write_text("x")
    (folder.parent / "empty-folder").mkdir()
    known = len(stack.log("nodeagent"))
    stack.start("nodeagent")
    wait_for("the adoption", lambda: "adopted" in stack.log("nodeagent")[known:], 15)
    stack.check_whole(active=1)
    assert engine.is_running()
    assert stack.workers("ACTIVE")[0].incarnation == worker.incarnation
    assert stack.ask().exact


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_damaged_store(stack: FaultStack) -> None:
    """The control plane does not start on it, says which file and what to do, and touches nothing; the rest serves."""
    stack.pool()
    stack.kill("controlplane")
    store = stack.folder / "cp" / "controlplane.sqlite"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    good = {path.name: path.read_bytes() for path in store.parent.iterdir()}
    for damage in (
        b"not a database" * 1000,
        good[store.name][:5000] + bytes(range(256)) * 60 + good[store.name][20_360:],
    ):
        for name in good:
            (store.parent / name).unlink(missing_ok=True)
        store.write_bytes(damage)
        result = _run(stack, "controlplane")
        assert result.returncode == 2, result
        assert str(store) in result.stderr, result.stderr
        assert "Traceback" not in result.stderr, result.stderr
        assert store.read_bytes()[:5000] == damage[:5000]
        assert stack.ask().exact
    for path in store.parent.iterdir():
        path.unlink()
    for name, content in good.items():
        (store.parent / name).write_bytes(content)
    stack.start("controlplane")
    stack.check_whole(active=1)


def _run(stack: FaultStack, name: str, *more: str, user: int | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *stack.commands[name], *more],
        env=stack.environ,
        cwd=stack.folder,
        capture_output=True,
        text=True,
        timeout=60,
        user=user,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["controlplane", "nodeagent", "router"])
def test_a_data_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    """Exit code 2 and one line that names it; no traceback."""
    stack = FaultStack(tmp_path, gpus=1, timing=TIMING)
    file = tmp_path / "file"
    file.write_text("x")
    for folder in (file, file / "below", Path("/proc/nowhere")):
        result = _run(stack, name, "--data-dir", str(folder))
        assert result.returncode == 2, (folder, result)
        assert str(folder) in result.stderr, (folder, result.stderr)
        assert "Traceback" not in result.stderr, result.stderr
