"""The configuration files of a virtual cluster."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cluster pretends to have, and its times. `slurmd_timeout_s`: silence after which a node is down."""

    nodes: int = 4
    gpus: int = 2
    cpus: int = 16
    memory_mb: int = 65_536
    slurmd_timeout_s: int = 4
    kill_wait_s: int = 4
    grace_s: int = 3


def node_name(number: int) -> str:
    """Nodes count from 1."""
    return f"vnode{number}"


def slurm_conf(root: Path, shape: Shape, ports: Mapping[str, int]) -> str:
    """`ports`: of `slurmctld` and of each node by name.

    `low` is preempted with a requeue, `lowcancel` for good, `high` preempts both.
    """
    host = socket.gethostname().partition(".")[0]
    settings = {
        "ClusterName": "virtual",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports["slurmctld"],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/run/munge.socket",
        "CredType": "cred/munge",
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": f"{root}/spool-%n",
        "SlurmctldPidFile": root / "run/slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/slurmd-%n.pid",
        "SlurmctldLogFile": root / "log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "ReturnToService": 2,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "GresTypes": "gpu",
        "SlurmdParameters": "config_overrides",
        "SlurmctldParameters": "preempt_send_user_signal",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,"
        "batch_sched_delay=0,default_queue_depth=1000,preempt_youngest_first",
        "SchedulerType": "sched/backfill",
        "PriorityType": "priority/multifactor",
        "PriorityWeightPartition": 100_000,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "PreemptExemptTime": 0,
        "KillWait": shape.kill_wait_s,
        "MinJobAge": 3600,
        "CompleteWait": 0,
        "InactiveLimit": 0,
        "Waittime": 0,
        "SlurmctldTimeout": 10,
        "SlurmdTimeout": shape.slurmd_timeout_s,
        "MessageTimeout": 5,
        "TCPTimeout": 2,
        "BatchStartTimeout": 10,
        "JobRequeue": 1,
        "MailProg": "/bin/true",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": root / "log/jobcomp.txt",
        "AccountingStorageType": "accounting_storage/none",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    for number in range(1, shape.nodes + 1):
        name = node_name(number)
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[name]} CPUs={shape.cpus} "
            f"RealMemory={shape.memory_mb} Gres=gpu:h100:{shape.gpus} State=UNKNOWN"
        )
    common = "Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO"
    grace = f"GraceTime={shape.grace_s}"
    lines += [
        f"PartitionName=low {common} Default=YES PriorityTier=1 PreemptMode=REQUEUE {grace}",
        f"PartitionName=lowcancel {common} PriorityTier=1 PreemptMode=CANCEL {grace}",
        f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(root: Path, shape: Shape) -> str:
    """GPUs are clones of /dev/null: slurmd insists on devices."""
    devices = f"{root}/dev/gpu[0-{shape.gpus - 1}]"
    return f"AutoDetect=off\nNodeName=vnode[1-{shape.nodes}] Name=gpu Type=h100 File={devices}\n"
