"""Settings of the provider `slurm`: table [provider] of the provisioner's file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.config import setting
from springtide.errors import InvalidArgument

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
UNLIMITED = ("infinite", "unlimited")


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs are asked for, and what runs in them."""

    name: str = setting("slurm", doc="Name of the capability set.")
    partition: str = setting("", doc="--partition; empty: the cluster's default.")
    qos: str = setting("", doc="--qos.")
    account: str = setting("", doc="--account.")
    constraint: str = setting("", doc="--constraint, e.g. h200|h100.")
    time_limit: str = setting("72:00:00", doc="--time of one job: MIN, MIN:SEC, H:MIN:SEC, D-H:MIN:SEC or UNLIMITED.")
    exclusive: bool = setting(True, doc="--exclusive: whole nodes.")
    slurm_extra: str = setting("", doc="More sbatch options, separated by semicolons: --mem=0;--nice=100.")
    gpus_per_node: int = setting(8, doc="GPUs of one job (--gres=gpu:N); 0 asks for none.", minimum=0, maximum=64)
    gpu_type: str = setting("", doc="Type within --gres, e.g. h200.")
    max_nodes: int = setting(16, doc="Most jobs at a time.", minimum=0, maximum=4096)
    greedy: bool = setting(True, doc="Have max_nodes whatever the pools ask for (or target_file's number).")
    target_file: str = setting(
        "",
        doc="File with one whole number: the target of now. Read again each time; `springtide slurm target` writes it.",
    )
    surge_nodes: int = setting(
        1,
        doc="Nodes beyond the target, within max_nodes, while one whose end is near is replaced.",
        minimum=0,
        maximum=64,
    )
    notice_s: int = setting(
        60,
        doc="--signal=B:TERM@N: warning before the time limit; the agent drains within it. 0: none is asked for.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    preempt_grace_s: int = setting(
        30,
        doc="What the partition leaves after a preemption's signal (GraceTime or KillWait): the agent's drain.",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    requeue: bool = setting(False, doc="--requeue: a preempted job comes again as the same node.")
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes, for placement.")
    resources: Mapping[str, int] = setting(default_factory=dict, doc="Countable units of one node.")
    spot: bool = setting(True, doc="Jobs may be preempted.")
    cost_per_hour: float = setting(0.0, doc="Of one node, in any currency.", minimum=0)
    controlplane: str = setting("", doc="Control plane as jobs reach it, host:port. Default: as the provisioner does.")
    agent_host: str = setting(
        "", doc="Address that shims listen on. Default: the node's own address towards the control plane."
    )
    agent_insecure: bool = setting(False, doc="Shims may listen on a network address (plain HTTP): a trusted network.")
    simulated_gpus: bool = setting(False, doc="The agent counts the GPUs that SLURM gave and does not look at them.")
    python: str = setting("", doc="Python of the agent on the nodes. Default: the provisioner's own.")
    interpreters: Mapping[str, str] = setting(
        default_factory=dict, doc="Python of each engine's environment on the nodes; shell variables count."
    )
    allowed_flags: tuple[str, ...] = setting(
        (), doc="Engine flags that agents deny by default and allow here, e.g. --trust-remote-code."
    )
    agent_options: Mapping[str, str] = setting(
        default_factory=dict, doc="More of the agent's settings, as in nodeagent.toml, each a TOML value."
    )
    preamble: str = setting("", doc="Shell lines at the start of each job, e.g. module load cuda.")
    working_dir: str = setting("", doc="--chdir of the jobs. Default: the provisioner's folder.")
    log_dir: str = setting(
        "", doc="Folder of the jobs' output, seen by all nodes. Default: the provisioner's data_dir."
    )
    data_dir: str = setting(
        "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/springtide-$SLURM_JOB_ID",
        doc="Folder of each job's agent, on its node; shell variables count. Removed after a clean end.",
    )
    poll_interval_s: float = setting(1.0, doc="squeue is asked at most so often.", unit="s", minimum=0, maximum=300)
    submit_interval_s: float = setting(0.0, doc="Pause between two sbatch calls.", unit="s", minimum=0, maximum=60)
    sbatch_timeout_s: float = setting(30.0, doc="Longest wait for sbatch.", unit="s", minimum=0.1)
    squeue_timeout_s: float = setting(10.0, doc="Longest wait for squeue.", unit="s", minimum=0.1)
    scancel_timeout_s: float = setting(15.0, doc="Longest wait for scancel.", unit="s", minimum=0.1)
    settle_s: float = setting(
        15.0,
        doc="An sbatch whose outcome is unknown is repeated when squeue has not shown its job for so long.",
        unit="s",
        minimum=0,
        maximum=600,
    )

    def check(self) -> None:
        """Raises InvalidArgument for what `setting` cannot say."""
        limit_s = time_limit_s(self.time_limit)
        if limit_s is not None and self.notice_s >= limit_s:
            raise InvalidArgument(
                field="provider.notice_s",
                value=self.notice_s,
                problem=f"is not less than provider.time_limit = {self.time_limit}",
                remedy="Lower provider.notice_s or raise provider.time_limit.",
            )
        for option in self.extra_options():
            if not option.startswith("-"):
                raise InvalidArgument(
                    field="provider.slurm_extra",
                    value=option,
                    problem="is no option",
                    remedy="Separate options by semicolons, each with its value: --mem=0;--nice=100.",
                )

    def extra_options(self) -> tuple[str, ...]:
        """Of `slurm_extra`."""
        return tuple(part for part in (entry.strip() for entry in self.slurm_extra.split(";")) if part)


def time_limit_s(text: str) -> float | None:
    """Seconds of a SLURM time limit; None for no limit (and for none given). Raises InvalidArgument."""
    if not text or text.lower() in UNLIMITED:
        return None
    if not _TIME.fullmatch(text):
        raise InvalidArgument(
            field="provider.time_limit",
            value=text,
            problem="is no time limit",
            remedy="Write MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN, D-H:MIN:SEC or UNLIMITED.",
        )
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return int(days or 0) * 86_400.0 + hours * 3600 + minutes * 60 + seconds
