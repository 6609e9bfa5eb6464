"""The provider `slurm`: orders become jobs, squeue says what became of them, and nothing is kept that squeue knows.

An order whose outcome is unknown is looked up before it is repeated; for the moment between sbatch and its answer a
small file says that it was asked, so that a provisioner killed there does not ask twice. Should two jobs ever be one
node, the younger is cancelled.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import springtide
from provisioner.context import ProviderContext
from provisioner.core.provider import CapabilitySet, GroupOrder, OutcomeUnknown, ProvidedNode, Refused
from provisioner.core.room import named
from provisioner.core.sets import capability_set
from provisioner.slurm import commands
from provisioner.slurm.asked import AskedFiles
from provisioner.slurm.jobs import Job, gone, mark, newest_of_each
from provisioner.slurm.script import Node, script
from provisioner.slurm.settings import SlurmSettings
from provisioner.slurm.squeue import Squeue

log = logging.getLogger(__name__)

ENDED_RETENTION_S = 900.0
MAX_REMEMBERED = 4096
_NOT_FOR_JOBS = ("SPRINGTIDE_", "SLURM_", "SLURMD_", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""The last four are of a job that the provisioner itself runs in: sbatch would take them for this one's options."""
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmProvider:
    """Implements provisioner.core.provider.Provider. `clock`: seconds since the epoch, as SLURM counts."""

    def __init__(
        self, settings: SlurmSettings, context: ProviderContext, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises SpringtideError for settings that cannot work, OSError for a folder that cannot be written."""
        settings.check()
        self._settings = settings
        self._context = context
        self._id = context.provisioner_id
        self._clock = clock
        data_dir = context.data_dir.absolute()
        self._asked = AskedFiles(data_dir / "asked")
        self._log_dir = Path(settings.log_dir).expanduser().absolute() if settings.log_dir else data_dir / "jobs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._working_dir = settings.working_dir or str(data_dir)
        self._target_file = Path(settings.target_file) if settings.target_file else data_dir / "target"
        self._squeue = Squeue(self._id, settings.squeue_timeout_s, clock)
        self._listing = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._submitted_at = 0.0
        self._jobs: dict[str, Job] = {}  # by node id, of the newest listing; and ends that squeue forgot
        self._listed_at: float | None = None
        self._never_listed = True
        self._submitted: dict[str, float] = {}  # job ids of ours that the newest listing cannot have
        self._ended_at: dict[str, float] = {}
        self._released: dict[str, float] = {}  # job ids that we cancelled
        self._replaced: dict[str, float] = {}  # job ids that ended, and whose nodes were submitted again
        self._shut: dict[str, float] = {}  # groups that were shut down

    # ------------------------------------------------------------ the interface

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        """One. Greedy, it keeps the target of now; a node more may come while one whose end is near is replaced."""
        s = self._settings
        target = self.target()
        most = min(s.max_nodes, target + s.surge_nodes)
        return [capability_set(s, keep_nodes=target if s.greedy else 0, max_nodes=most)]

    def target(self) -> int:
        """What the target file says, within 0 and `max_nodes`; `max_nodes` without one."""
        try:
            return max(0, min(self._settings.max_nodes, int(self._target_file.read_text())))
        except FileNotFoundError:
            return self._settings.max_nodes
        except (OSError, ValueError) as error:
            log.warning("the target in %s cannot be read (%s): max_nodes counts", self._target_file, error)
            return self._settings.max_nodes

    async def start(self, order: GroupOrder) -> None:
        """A job for each node that has none that lives. Raises Refused, OutcomeUnknown."""
        named(order.group_id)
        if order.group_id in self._shut:
            raise Refused("WORKER_GROUP_SHUTDOWN", f"Group {order.group_id} was shut down before.")
        if order.capability_set not in ("", self._settings.name):
            raise Refused("WORKER_GROUP_TOO_MUCH", f"There is no capability set {order.capability_set!r} here.")
        async with self._submitting:
            if self._never_listed or any(self._is_doubtful(node_id) for node_id in order.node_ids):
                await self._look()
            missing = [node_id for node_id in order.node_ids if not self._lives(node_id)]
            if not missing:
                return
            if self._room() < len(missing):
                await self._look()  # one may have ended meanwhile
            if self._room() < len(missing):
                live = self._settings.max_nodes - self._room()
                message = f"{live} nodes are there and {self._settings.max_nodes} is the most."
                raise Refused("WORKER_GROUP_TOO_MUCH", message)
            for node_id in missing:
                await self._submit(order, node_id)

    def _lives(self, node_id: str) -> bool:
        job = self._jobs.get(node_id)
        return job is not None and job.live

    def _is_doubtful(self, node_id: str) -> bool:
        """It was asked for without an answer, or its job has ended: it may be there all the same."""
        return self._asked.at(node_id) is not None or (node_id in self._jobs and not self._lives(node_id))

    def _room(self) -> int:
        return self._settings.max_nodes - sum(job.live for job in self._jobs.values())

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Cancels the group's jobs. Raises Refused for an unknown group, OutcomeUnknown."""
        named(group_id)
        async with self._submitting:
            jobs = [job for job in self._jobs.values() if job.group_id == group_id]
            if not jobs or {job.node_id for job in jobs} < set(node_ids):
                await self._look()
                jobs = [job for job in self._jobs.values() if job.group_id == group_id]
            unsure = [node_id for node_id in node_ids if self._unsure(node_id)]
            if not jobs and not unsure and group_id not in self._shut:
                raise Refused("WORKER_GROUP_ID_NOT_FOUND", f"There is no job of group {group_id}.")
            await self._cancel([job.job_id for job in jobs if job.live])
            if unsure:
                raise OutcomeUnknown(f"Whether {', '.join(unsure)} was submitted shows in a moment.")
            self._remember(self._shut, group_id)

    async def list(self) -> Sequence[ProvidedNode]:
        """All jobs of this provisioner's id, and ends for a while. Raises OutcomeUnknown."""
        await self._refresh(self._settings.poll_interval_s)
        s = self._settings
        return [
            job.node(s.name, released=job.job_id in self._released, notice_s=float(s.notice_s))
            for _, job in sorted(self._jobs.items())
        ]

    async def close(self) -> None:
        """Jobs stay."""

    async def cancel_all(self) -> Sequence[str]:
        """Cancels every live job of this provisioner, also of earlier processes; their ids. Raises OutcomeUnknown."""
        async with self._submitting:
            await self._look()
            live = [job.job_id for job in self._jobs.values() if job.live]
            await self._cancel(live)
            return live

    # ------------------------------------------------------------ sbatch

    async def _submit(self, order: GroupOrder, node_id: str) -> None:
        if self._unsure(node_id):
            raise OutcomeUnknown(f"Whether {node_id} was submitted before shows in a moment.")
        pause_s = self._submitted_at + self._settings.submit_interval_s - self._clock()
        if pause_s > 0:
            await asyncio.sleep(min(pause_s, self._settings.submit_interval_s))
        self._asked.put(node_id, self._clock())
        before = self._jobs.pop(node_id, None)
        if before is not None:  # it has ended: squeue goes on to show it, and it is the node no more
            self._remember(self._replaced, before.job_id)
        name = mark(self._id, order.group_id, node_id)
        try:
            said = await commands.run(
                ["sbatch", *self._options(name)],
                self._settings.sbatch_timeout_s,
                stdin=script(self._settings, self._node(node_id)),
                env=self._environment(order),
            )
        except commands.CommandFailed as error:
            failure = commands.submission_error(error)
            if isinstance(failure, Refused):
                self._asked.remove(node_id)
                if before is not None:
                    self._jobs[node_id] = before
                    self._replaced.pop(before.job_id, None)
            raise failure from None
        finally:
            self._submitted_at = self._clock()
            self._listed_at = None
        job_id = said.strip().splitlines()[-1].partition(";")[0] if said.strip() else ""
        if not job_id.isdigit():
            raise OutcomeUnknown(f"sbatch answered {said.strip()[:200]!r} and not a job id.")
        self._jobs[node_id] = Job(job_id, order.group_id, node_id, "PENDING")
        self._submitted[job_id] = self._clock()
        self._asked.remove(node_id)
        log.info("job %s submitted for node %s", job_id, node_id, extra={"node": node_id})

    def _options(self, name: str) -> Sequence[str]:
        s = self._settings
        gres = ":".join(filter(None, ("gpu", s.gpu_type, str(s.gpus_per_node)))) if s.gpus_per_node else ""
        wanted = {
            "--partition": s.partition,
            "--qos": s.qos,
            "--account": s.account,
            "--constraint": s.constraint,
            "--time": s.time_limit,
            "--gres": gres,
            "--signal": f"B:TERM@{s.notice_s}" if s.notice_s else "",
            "--chdir": self._working_dir,
            "--output": str(self._log_dir / "%j.out"),
        }
        return [
            *("--parsable", "--nodes=1", "--ntasks=1", "--export=ALL", "--open-mode=append"),
            *(f"--job-name={name}", f"--comment={name}"),
            *(f"{option}={value}" for option, value in wanted.items() if value),
            *(("--exclusive",) if s.exclusive else ()),
            "--requeue" if s.requeue else "--no-requeue",
            *s.extra_options(),
        ]

    def _node(self, node_id: str) -> Node:
        s = self._settings
        root = str(Path(springtide.__file__).resolve().parents[1])
        return Node(
            node_id=node_id,
            controlplane=self._settings.controlplane or self._context.agent_controlplane,
            python=s.python or sys.executable,
            import_path="" if s.python or "site-packages" in root else root,
            labels=self._context.agent_labels(s.labels),
        )

    def _environment(self, order: GroupOrder) -> Mapping[str, str]:
        """Ours without what is ours alone (an operator's token is nothing for a job), and what the agent joins with.

        So the join token reaches the job in its environment: argv, script and logs never show it.
        """
        env = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_NOT_FOR_JOBS)}
        for variable in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"):
            env.pop(variable, None)
        env |= self._context.agent_environment(order)
        if order.traceparent:
            env["TRACEPARENT"] = order.traceparent
        return env

    def _unsure(self, node_id: str) -> bool:
        """It was asked for, no job of it shows, and it may still come."""
        asked_at = self._asked.at(node_id)
        if asked_at is None or node_id in self._jobs:
            return False
        last_s = self._settings.sbatch_timeout_s + self._settings.settle_s
        return asked_at <= self._clock() < asked_at + last_s

    # ------------------------------------------------------------ scancel

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        if not job_ids:
            return
        for job_id in job_ids:
            self._remember(self._released, job_id)
        self._listed_at = None
        try:
            await commands.run(["scancel", *job_ids], self._settings.scancel_timeout_s)
        except commands.CommandFailed as error:
            raise OutcomeUnknown(str(error)) from None

    def _remember(self, memory: dict[str, float], key: str) -> None:
        memory[key] = self._clock()
        while len(memory) > MAX_REMEMBERED:
            memory.pop(next(iter(memory)))

    # ------------------------------------------------------------ squeue

    async def _look(self) -> None:
        """A listing that is not older than this call."""
        await self._refresh(0.0)

    async def _refresh(self, max_age_s: float) -> None:
        async with self._listing:
            began = self._clock()
            if self._listed_at is not None and 0 <= began - self._listed_at < max_age_s:
                return
            jobs = [job for job in await self._squeue.jobs() if job.job_id not in self._replaced or job.live]
            now = self._clock()
            chosen, doubles = newest_of_each(jobs)
            self._take(chosen, began, now)
            self._listed_at = now
            self._never_listed = False
        for job in doubles:
            log.warning("job %s is a second one for node %s and is cancelled", job.job_id, job.node_id)
        await self._cancel([job.job_id for job in doubles])

    def _take(self, found: dict[str, Job], began: float, now: float) -> None:
        """What squeue no longer shows has ended: how it did is known if it was seen, else it is said so. A job that was
        submitted after squeue had begun cannot be in its answer."""
        for node_id, job in self._jobs.items():
            if node_id in found:
                continue
            if self._submitted.get(job.job_id, -1.0) >= began:
                found[node_id] = job
                continue
            if now - self._ended_at.setdefault(job.job_id, now) < ENDED_RETENTION_S:
                found[node_id] = gone(job) if job.live else job
        for node_id, job in list(found.items()):
            self._asked.remove(node_id)
            if not job.live and now - self._ended_at.setdefault(job.job_id, now) >= ENDED_RETENTION_S:
                del found[node_id]
        self._jobs = found
        self._submitted = {job_id: at for job_id, at in self._submitted.items() if at >= began}
        known = {job.job_id for job in found.values()}
        self._ended_at = {job_id: at for job_id, at in self._ended_at.items() if job_id in known}
