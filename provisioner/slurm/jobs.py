"""What squeue says, as jobs of ours and as the nodes that they are. Pure: text in, values out.

Every job of a provisioner carries `springtide:PROVISIONER:GROUP:NODE` as its comment and its name (sites may strip
comments), so that a provisioner that knows nothing finds them all again.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from provisioner.core.provider import Phase, ProvidedNode

MARK = "springtide"
SEPARATOR = "\x1f"
FORMAT = SEPARATOR.join(("%i", "%U", "%T", "%r", "%L", "%M", "%l", "%N", "%j", "%k"))
"""For `squeue -o` of versions without --json: id, uid, state, reason, left, used, limit, nodes, name, comment."""

_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED"}
_REASONS = {
    "PREEMPTED": "PREEMPTED",
    "NODE_FAIL": "NODE_FAIL",
    "BOOT_FAIL": "START_FAILED",
    "LAUNCH_FAILED": "START_FAILED",
    "TIMEOUT": "TIME_LIMIT",
    "DEADLINE": "TIME_LIMIT",
    "CANCELLED": "CANCELLED",
    "REVOKED": "CANCELLED",
    "OUT_OF_MEMORY": "OUT_OF_MEMORY",
}
_LAUNCH_FAILURES = ("JobLaunchFailure", "BadConstraints", "RaisedSignal")
_LIMIT_SLACK_S = 70.0  # slurmctld looks at time limits once a minute
_START_FAILED_S = 60.0  # a job that fails within it never served
_NO_LIMIT_S = 300 * 86_400.0  # what SLURM calls infinite ends in a year


@dataclass(frozen=True, slots=True)
class Job:
    """One job of this provisioner. Times in seconds; None is unknown or none."""

    job_id: str
    group_id: str
    node_id: str
    state: str
    reason: str = ""
    host: str = ""
    restarts: int = 0
    left_s: float | None = None
    ran_s: float | None = None
    limit_s: float | None = None
    preempted: bool = False

    @property
    def phase(self) -> Phase:
        if self.state in _PENDING:
            return Phase.PENDING
        if self.state in _RUNNING:
            return Phase.ENDING if self.preempted else Phase.RUNNING
        return Phase.ENDING if self.state == "COMPLETING" else Phase.ENDED

    @property
    def live(self) -> bool:
        """It has, or may yet get, a host."""
        return self.phase is not Phase.ENDED

    def node(self, capability_set: str, *, released: bool, notice_s: float) -> ProvidedNode:
        """`released`: we cancelled it. `notice_s`: how long before its limit it is warned."""
        phase = self.phase
        why = ""
        if phase is Phase.ENDED or phase is Phase.ENDING:
            why = "RELEASED" if released and not self.preempted else self._end(notice_s)
        left_s = self.left_s if phase in (Phase.RUNNING, Phase.ENDING) else None
        if left_s is not None and phase is Phase.RUNNING:
            left_s = left_s - notice_s  # from then on the agent drains
        return ProvidedNode(
            node_id=self.node_id,
            group_id=self.group_id,
            capability_set=capability_set,
            phase=phase,
            reference=self.job_id,
            reason=why,
            message=self._message(),
            ends_in_s=None if left_s is None else max(0.0, left_s),
        )

    def _end(self, notice_s: float) -> str:
        if self.preempted:  # one that drained in its grace time ends as COMPLETED
            return "PREEMPTED"
        if self.state in _REASONS:
            return _REASONS[self.state]
        if self.reason in _LAUNCH_FAILURES:
            return "START_FAILED"
        if self.state == "FAILED" and (self.ran_s or 0.0) < _START_FAILED_S:
            return "START_FAILED"
        if self.limit_s and self.ran_s is not None and self.ran_s >= self.limit_s - notice_s - _LIMIT_SLACK_S:
            return "TIME_LIMIT"
        return "JOB_FAILED" if self.state == "FAILED" else "COMPLETED" if self.state == "COMPLETING" else self.state

    def _message(self) -> str:
        where = f" on {self.host}" if self.host else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        again = f", started {self.restarts + 1} times" if self.restarts else ""
        return f"Job {self.job_id} is {self.state}{why}{where}{again}."


def gone(job: Job) -> Job:
    """One that squeue showed alive and shows no longer: it has ended, and nobody says how."""
    return replace(job, state="GONE", reason="squeue no longer shows it", left_s=None)


def mark(provisioner_id: str, group_id: str, node_id: str) -> str:
    """Comment and name of a job. The ids have no colons."""
    return f"{MARK}:{provisioner_id}:{group_id}:{node_id}"


def read_mark(provisioner_id: str, *texts: str) -> tuple[str, str] | None:
    """(group id, node id) of the first text that is a mark of this provisioner."""
    for text in texts:
        parts = text.split(":")
        if len(parts) == 4 and parts[0] == MARK and parts[1] == provisioner_id and parts[2] and parts[3]:
            return parts[2], parts[3]
    return None


def from_json(text: str, provisioner_id: str, now: float, uid: int | None = None) -> list[Job]:
    """Of `squeue --json`. Raises ValueError for what is no such thing. `now`: seconds since the epoch. `uid`: only the
    jobs of that user."""
    whole = json.loads(text)
    if not isinstance(whole, dict) or not isinstance(whole.get("jobs"), list):
        raise ValueError("no jobs in squeue's JSON")
    if whole.get("errors"):
        raise ValueError(f"squeue says {whole['errors']}")
    jobs = []
    for entry in whole["jobs"]:
        found = read_mark(provisioner_id, str(entry.get("comment") or ""), str(entry.get("name") or ""))
        if found is not None and (uid is None or _number(entry.get("user_id")) == uid):
            jobs.append(_json_job(entry, found, now))
    return jobs


def _json_job(entry: Mapping[str, Any], ids: tuple[str, str], now: float) -> Job:
    states = entry["job_state"] if isinstance(entry["job_state"], list) else [entry["job_state"]]
    state = "COMPLETING" if "COMPLETING" in states else str(states[0]).upper()
    began, ends = _number(entry.get("start_time")), _number(entry.get("end_time"))
    preempted_at = _number(entry.get("preempt_time"))
    limit_min = _number(entry.get("time_limit"))
    over = state not in _PENDING | _RUNNING
    running = state in _RUNNING or state == "COMPLETING"
    known = bool(began) and state not in _PENDING
    left_s = ends - now if ends and running and ends - now < _NO_LIMIT_S else None
    ran_s = max(0.0, (ends if over and ends else now) - began) if began and known else None
    return Job(
        job_id=str(int(_number(entry["job_id"]) or 0)),
        group_id=ids[0],
        node_id=ids[1],
        state=state,
        reason=str(entry.get("state_reason") or ""),
        host=str(entry.get("batch_host") or entry.get("nodes") or ""),
        restarts=int(_number(entry.get("restart_cnt")) or 0),
        left_s=left_s,
        ran_s=ran_s,
        limit_s=limit_min * 60 if limit_min else None,
        preempted=bool(preempted_at and known and began and preempted_at >= began and state != "RESIZING"),
    )


def _number(value: Any) -> float | None:
    """A number, or {"set": bool, "infinite": bool, "number": n} of newer versions."""
    if isinstance(value, Mapping):
        return float(value["number"]) if value.get("set") and not value.get("infinite") else None
    return None if value is None else float(value)


def from_text(text: str, provisioner_id: str, uid: int | None = None) -> list[Job]:
    """Of `squeue -h -o FORMAT`. Raises ValueError. `uid`: only the jobs of that user."""
    jobs = []
    for line in text.splitlines():
        if not line.strip():
            continue
        parts = line.split(SEPARATOR)
        if len(parts) != 10:
            raise ValueError(f"a line of squeue has {len(parts)} parts: {line[:200]!r}")
        job_id, owner, state, reason, left, used, limit, host, name, comment = parts
        found = read_mark(provisioner_id, comment, name)
        if found is not None and (uid is None or owner == str(uid)):
            left_s = _duration(left)
            jobs.append(
                Job(
                    job_id=job_id,
                    group_id=found[0],
                    node_id=found[1],
                    state=state.upper(),
                    reason=reason,
                    host=host,
                    left_s=left_s if left_s is None or left_s < _NO_LIMIT_S else None,
                    ran_s=_duration(used) if state.upper() not in _PENDING else None,
                    limit_s=_duration(limit),
                )
            )
    return jobs


def _duration(text: str) -> float | None:
    """D-HH:MM:SS and its shorter forms, as squeue prints them (never bare minutes); None for words."""
    days, _, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86_400 + seconds


def newest_of_each(jobs: Iterable[Job]) -> tuple[dict[str, Job], list[Job]]:
    """One job for each node id, live ones before ended ones; and the live jobs that are one too many."""
    chosen: dict[str, Job] = {}
    doubles: list[Job] = []
    for job in sorted(jobs, key=_age):
        before = chosen.get(job.node_id)
        if before is None or not before.live:
            chosen[job.node_id] = job
        elif job.live:
            keep, drop = (
                (before, job) if before.phase is not Phase.PENDING or job.phase is Phase.PENDING else (job, before)
            )
            chosen[job.node_id] = keep
            doubles.append(drop)
    return chosen, doubles


def _age(job: Job) -> tuple[int, str]:
    return (int(job.job_id) if job.job_id.isdigit() else 0, job.job_id)
