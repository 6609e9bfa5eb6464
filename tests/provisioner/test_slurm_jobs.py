"""What is read from squeue and written into jobs, without any SLURM."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from provisioner.core.provider import Phase
from provisioner.ray.settings import RaySettings
from provisioner.slurm.jobs import from_json, from_text, mark, newest_of_each, read_mark
from provisioner.slurm.script import Node, script
from provisioner.slurm.settings import SlurmSettings, time_limit_s
from springtide.config import parse, reference
from springtide.errors import InvalidArgument

NOW = 2_000_000_000.0
ENTRY = {
    "job_id": 7,
    "name": "x",
    "comment": mark("hpc", "g", "n"),
    "job_state": "RUNNING",
    "state_reason": "None",
    "batch_host": "host-7",
    "start_time": NOW - 600,
    "end_time": NOW + 3000,
    "time_limit": 60,
    "preempt_time": 0,
    "restart_cnt": 0,
}


def job(**changed: Any) -> Any:
    (found,) = from_json(json.dumps({"jobs": [{**ENTRY, **changed}]}), "hpc", NOW)
    return found


@pytest.mark.parametrize(
    ("changed", "phase", "reason"),
    [
        ({}, Phase.RUNNING, ""),
        ({"job_state": "PENDING", "start_time": 0, "end_time": 0}, Phase.PENDING, ""),
        ({"job_state": "CONFIGURING"}, Phase.PENDING, ""),
        ({"job_state": "SUSPENDED"}, Phase.RUNNING, ""),
        ({"preempt_time": NOW - 1, "end_time": NOW + 2}, Phase.ENDING, "PREEMPTED"),
        ({"job_state": "PREEMPTED"}, Phase.ENDED, "PREEMPTED"),
        ({"job_state": "COMPLETED", "preempt_time": NOW - 9, "end_time": NOW - 5}, Phase.ENDED, "PREEMPTED"),
        ({"job_state": "NODE_FAIL", "end_time": NOW}, Phase.ENDED, "NODE_FAIL"),
        ({"job_state": "TIMEOUT", "end_time": NOW}, Phase.ENDED, "TIME_LIMIT"),
        ({"job_state": "COMPLETED", "end_time": NOW + 2910}, Phase.ENDED, "TIME_LIMIT"),
        ({"job_state": "CANCELLED", "end_time": NOW}, Phase.ENDED, "CANCELLED"),
        ({"job_state": "BOOT_FAIL", "end_time": NOW}, Phase.ENDED, "START_FAILED"),
        ({"job_state": "FAILED", "end_time": NOW - 590}, Phase.ENDED, "START_FAILED"),
        ({"job_state": "FAILED", "end_time": NOW}, Phase.ENDED, "JOB_FAILED"),
        ({"job_state": "OUT_OF_MEMORY", "end_time": NOW}, Phase.ENDED, "OUT_OF_MEMORY"),
        ({"job_state": "COMPLETED", "end_time": NOW}, Phase.ENDED, "COMPLETED"),
        ({"job_state": "COMPLETING", "state_reason": "NodeDown", "end_time": NOW}, Phase.ENDING, "COMPLETED"),
        ({"job_state": "A_NEW_ONE", "end_time": NOW}, Phase.ENDED, "A_NEW_ONE"),
    ],
)
def test_states(changed: dict[str, Any], phase: Phase, reason: str) -> None:
    """PV4: PREEMPTED, NODE_FAIL, TIME_LIMIT, CANCELLED and START_FAILED, as SLURM shows them."""
    node = job(**changed).node("slurm", released=False, notice_s=60.0)
    assert (node.phase, node.reason) == (phase, reason)


def test_the_end_is_known_ahead() -> None:
    """PV4: the time that is left, less the warning; a preempted one's grace; none where there is no limit."""
    assert job().node("slurm", released=False, notice_s=60.0).ends_in_s == 2940.0
    preempted = job(preempt_time=NOW - 1, end_time=NOW + 2).node("slurm", released=False, notice_s=60.0)
    assert preempted.ends_in_s == 2.0
    assert job(end_time=NOW + 365 * 86_400).node("slurm", released=False, notice_s=60.0).ends_in_s is None
    assert job(job_state="PENDING", end_time=NOW + 5).node("slurm", released=False, notice_s=0.0).ends_in_s is None


def test_a_requeued_job_is_the_same_node_again() -> None:
    """PV4: an earlier preemption is not the present one."""
    again = job(restart_cnt=1, preempt_time=NOW - 5000, start_time=NOW - 60)
    node = again.node("slurm", released=False, notice_s=0.0)
    assert node.phase is Phase.RUNNING
    assert "started 2 times" in node.message
    waiting = job(restart_cnt=1, job_state="PENDING", preempt_time=NOW - 5, start_time=NOW + 120)
    assert waiting.node("slurm", released=False, notice_s=0.0).phase is Phase.PENDING


def test_newer_shapes_of_json_are_read() -> None:
    """PV7: numbers as {set, infinite, number} and states as lists, as SLURM 23.11 writes them."""
    number = {"set": True, "infinite": False}
    found = job(
        job_state=["RUNNING"],
        start_time={**number, "number": NOW - 600},
        end_time={**number, "number": NOW + 3000},
        time_limit={"set": True, "infinite": True, "number": 0},
        preempt_time={"set": False, "infinite": False, "number": 0},
        restart_cnt=0,
    )
    assert (found.left_s, found.limit_s, found.preempted) == (3000.0, None, False)
    assert job(job_state=["CANCELLED", "COMPLETING"]).phase is Phase.ENDING


def test_plain_lines() -> None:
    """PV7: a comment may hold anything; a line of another shape is an error, never a job."""
    line = "\x1f".join(("9", "me", "RUNNING", "None", "1-02:03:04", "5:06", "3-0:0:0", "h", "x", mark("p", "g", "n")))
    (found,) = from_text(line + "\n\n", "p")
    assert found.left_s == 86_400 + 2 * 3600 + 3 * 60 + 4
    assert found.ran_s == 306.0
    assert from_text(line.replace("1-02:03:04", "UNLIMITED"), "p")[0].left_s is None
    with pytest.raises(ValueError, match="2 parts"):
        from_text("9\x1fme", "p")


def test_marks() -> None:
    assert read_mark("p", "", mark("p", "g", "n")) == ("g", "n")
    assert read_mark("p", mark("q", "g", "n"), "springtide:p:g", "anything") is None


def test_ended_jobs_do_not_hide_live_ones() -> None:
    """CP10: a node id whose first job ended and that was ordered again."""
    chosen, doubles = newest_of_each([job(job_id=9, job_state="NODE_FAIL"), job(job_id=10), job(job_id=3)])
    assert chosen["n"].job_id == "3"
    assert [double.job_id for double in doubles] == ["10"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("5:30", 330), ("72:00:00", 259_200), ("2-12", 216_000), ("1-00:30", 88_200), ("1-0:0:5", 86_405)],
)
def test_time_limits(text: str, seconds: float) -> None:
    """PV4: as sbatch reads them."""
    assert time_limit_s(text) == seconds


def test_settings_that_cannot_work() -> None:
    """PV4: field, value and remedy."""
    for key, value in (("time_limit", "soon"), ("time_limit", "1"), ("slurm_extra", "mem=0"), ("gpus_per_nod", 8)):
        with pytest.raises(InvalidArgument, match=key.replace("time_limit", "notice_s|time_limit")):
            parse(SlurmSettings, {key: value}, "slurm.").check()


STUB = """#!/bin/bash
# stands for `python -m nodeagent --config FILE`: counts its starts, and ends as it is told
trap 'echo USR1 >> "{folder}/told"; exit 0' USR1
if [ "$1" = -c ]; then echo 127.0.0.9; exit 0; fi
echo start >> "{folder}/starts"
cp "$4" "{folder}/settings"
if [ "$(wc -l < "{folder}/starts")" -lt {crashes} ]; then exit 9; fi
while sleep 0.05; do
  if [ -e "{folder}/job-12/notice" ]; then cp "{folder}/job-12/notice" "{folder}/told"; exit 0; fi
done
"""


def _start(tmp_path: Path, crashes: int, **settings: Any) -> "subprocess.Popen[bytes]":
    stub = tmp_path / "python"
    stub.write_text(STUB.format(folder=tmp_path, crashes=crashes))
    stub.chmod(0o755)
    node = Node("n-1", controlplane="cp.cluster:7400", python=str(stub), labels={'odd "label"': "a$b`c\\d"})
    text = script(SlurmSettings(data_dir=f"{tmp_path}/job-$SLURM_JOB_ID", **settings), node)
    env = {**os.environ, "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "host-7", "CUDA_VISIBLE_DEVICES": "0,3"}
    return subprocess.Popen(["bash", "-c", text], env=env, start_new_session=True)


def _until(path: Path, lines: int) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and len(path.read_text().splitlines()) >= lines):
        assert time.monotonic() < deadline, f"{path} has no {lines} lines"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("left", "told"),
    [("1:05", "63"), ("23:10", "90"), ("0:02", "1"), ("1-02:03:04", "90"), ("UNLIMITED", "USR1"), ("", "USR1")],
)
def test_the_script_passes_the_warning_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, told: str
) -> None:
    """PV4, NA10: a warning reaches the agent with the time that SLURM says is left, at most the asked one; where SLURM
    does not say, with the agent's own; its folder goes with a clean end; its settings are what was written."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{left}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    import tomllib

    options: dict[str, Any] = {"allowed_flags": ("--trust-remote-code",), "simulated_gpus": True, "notice_s": 90}
    process = _start(tmp_path, 0, interpreters={"vllm": "$HOME/venv/bin/python"}, **options)
    try:
        _until(tmp_path / "settings", 8)
        assert (tmp_path / "job-12").stat().st_mode & 0o077 == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert (tmp_path / "told").read_text() == f"{told}\n"
    assert not (tmp_path / "job-12").exists()
    found = tomllib.loads((tmp_path / "settings").read_text())
    assert found["host"] == "127.0.0.9"
    assert found["gpus"] == 2
    assert (found["stop_timeout_s"], found["notice_s"]) == (28.0, 28.0)
    assert found["labels"] == {'odd "label"': "a$b`c\\d", "slurm/job": "12", "slurm/node": "host-7"}
    assert found["launch"]["allowed_flags"] == ["--trust-remote-code"]
    assert found["launch"]["interpreters"]["vllm"] == os.environ["HOME"] + "/venv/bin/python"


def test_the_script_starts_a_crashed_agent_again(tmp_path: Path) -> None:
    """NA10: its engines live on and are adopted; only so often."""
    process = _start(tmp_path, 3)
    try:
        _until(tmp_path / "starts", 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


@pytest.mark.parametrize(("cls", "page"), [(SlurmSettings, "slurm.md"), (RaySettings, "ray.md")])
def test_every_setting_is_documented(cls: type, page: str) -> None:
    """The tables of docs/slurm.md and docs/ray.md, with the defaults and the words of the code."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    for key, default, unit, doc in reference(cls):
        row = f"| `{key}` | `{default}` | {unit} | {doc} |".replace("h200|h100", "h200\\|h100")
        assert row in text, row
