"""From what the control plane wants to what each worker's task is told; what is stale or foreign is refused.

Rules: a generation older than the one acted on is refused. Only an explicit STOP or DRAIN of the worker's own store
counts; absence never stops anything. Another store may take a live worker over by asking for the same engine with RUN.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from nodeagent.core.fingerprint import fingerprint
from nodeagent.core.slices import check_slice
from springtide.errors import InvalidArgument
from springtide.model.desired import DesiredWorker
from springtide.model.enums import Want


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """One worker of the ledger. `live`: a process of it may exist, so its GPUs are taken."""

    worker_id: str
    store_id: str
    generation: int
    want: Want
    live: bool
    gpu_ids: tuple[str, ...] = ()
    launch_fingerprint: str = ""
    asleep: bool = False  # its memory is released: its GPUs may be lent


class Verdict(StrEnum):
    """What becomes of one desired worker."""

    FOLLOW = "FOLLOW"  # the worker's task converges on it
    REFUSE_START = "REFUSE_START"  # follow it by reporting FAILED: it can never start like this
    IGNORE = "IGNORE"  # stale or foreign: as if it had not been said


@dataclass(frozen=True, slots=True)
class Step:
    """One desired worker with its verdict. `reason` is UPPER_SNAKE and empty for FOLLOW."""

    desired: DesiredWorker
    verdict: Verdict
    reason: str = ""
    message: str = ""


_ORDER = {Want.STOP: 0, Want.DRAIN: 1, Want.SLEEP: 2, Want.RUN: 3}


def converge(
    store_id: str,
    desired: Iterable[DesiredWorker],
    known: Mapping[str, KnownWorker],
    present_gpus: Collection[str],
) -> list[Step]:
    """The steps in the order to take them: stops, drains, sleeps, runs. An unknown want is left out.

    A GPU that a stop of the same message is about to free still counts as taken: it is free when its worker says so.
    GPUs of a sleeper are not taken; it wakes when nobody has them.
    """
    awake = [worker for worker in known.values() if worker.live and not worker.asleep]
    taken = {gpu: worker.worker_id for worker in awake for gpu in worker.gpu_ids}
    steps: list[Step] = []
    seen: set[str] = set()
    ordered = sorted(
        (worker for worker in desired if worker.want is not None),
        key=lambda worker: (_ORDER[worker.want or Want.RUN], worker.worker_id, -worker.generation),
    )
    for worker in ordered:
        if worker.worker_id in seen:
            steps.append(Step(worker, Verdict.IGNORE, "SAID_TWICE", "the worker is in the message twice"))
            continue
        seen.add(worker.worker_id)
        step = _judge(store_id, worker, known.get(worker.worker_id), present_gpus, taken)
        steps.append(step)
        there = known.get(worker.worker_id)
        if step.verdict is Verdict.FOLLOW and _starts(store_id, worker, there):
            taken.update(dict.fromkeys(worker.launch.gpu_ids, worker.worker_id))
        elif step.verdict is Verdict.FOLLOW and there is not None and _wakes(worker, there):
            taken.update(dict.fromkeys(there.gpu_ids, worker.worker_id))
    return steps


def may_forget(store_id: str, known: KnownWorker, desired_ids: Collection[str]) -> bool:
    """Whether the record of a worker without any process can go: its own store no longer speaks of it."""
    return not known.live and known.store_id == store_id and known.worker_id not in desired_ids


def _judge(
    store_id: str,
    worker: DesiredWorker,
    known: KnownWorker | None,
    present_gpus: Collection[str],
    taken: Mapping[str, str],
) -> Step:
    if known is not None and known.store_id == store_id and worker.generation < known.generation:
        message = f"generation {worker.generation} is older than {known.generation}"
        return Step(worker, Verdict.IGNORE, "OLDER_GENERATION", message)
    if known is not None and known.live and known.store_id != store_id:
        return _judge_foreign(worker, known)
    if known is not None and _wakes(worker, known):
        users = sorted({taken[gpu] for gpu in known.gpu_ids if gpu in taken} - {worker.worker_id})
        if users:
            return Step(worker, Verdict.IGNORE, "GPU_LENT", f"its GPUs are lent to {', '.join(users)}; it wakes after")
    if _starts(store_id, worker, known):
        others = {gpu: owner for gpu, owner in taken.items() if owner != worker.worker_id}
        try:
            check_slice(worker.launch.gpu_ids, worker.launch.tensor_parallel_size, present_gpus, others)
        except InvalidArgument as error:
            return Step(worker, Verdict.REFUSE_START, error.reason, str(error))
    return Step(worker, Verdict.FOLLOW)


def _starts(store_id: str, worker: DesiredWorker, known: KnownWorker | None) -> bool:
    """Whether the worker has no process and following the order makes it start one."""
    starts = worker.want is Want.RUN or (worker.want is Want.SLEEP and worker.start_asleep)
    if not starts or (known is not None and known.live):
        return False
    return known is None or known.store_id != store_id or worker.generation > known.generation


def _wakes(worker: DesiredWorker, known: KnownWorker) -> bool:
    """Whether following the order makes a sleeper take its memory again."""
    return worker.want is Want.RUN and known.live and known.asleep


def _judge_foreign(worker: DesiredWorker, known: KnownWorker) -> Step:
    """A live engine of another store."""
    if worker.want is not Want.RUN:
        message = f"worker belongs to store {known.store_id}; only that store may stop it"
        return Step(worker, Verdict.IGNORE, "FOREIGN_STORE", message)
    if fingerprint(worker.launch) != known.launch_fingerprint:
        message = f"worker belongs to store {known.store_id} and runs another launch"
        return Step(worker, Verdict.IGNORE, "FOREIGN_LAUNCH", message)
    return Step(worker, Verdict.FOLLOW)
