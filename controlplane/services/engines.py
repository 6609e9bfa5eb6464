"""Verbs that operators send to one worker's engine, through its node's agent."""

import asyncio
from collections.abc import Mapping
from typing import Any

from controlplane.core import orders
from controlplane.core.draft import report_of
from controlplane.core.snapshot import Snapshot
from controlplane.loops.leader import Leader
from controlplane.verbs import Verbs
from springtide.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from springtide.model.enums import ReportedPhase, State
from springtide.model.worker import Worker

DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 600.0
_LOOK_S = 0.05


class EngineOrders:
    """A pause and its end are recorded before the engine hears of them; all other verbs are the engine's alone."""

    def __init__(self, leader: Leader, verbs: Verbs) -> None:
        self._leader = leader
        self._verbs = verbs

    async def perform(
        self, worker_id: str, verb: str, args: Mapping[str, str], timeout_s: float | None
    ) -> dict[str, Any]:
        """What the engine answers. Raises what it raises, NotFound, FailedPrecondition, Unavailable."""
        seconds = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < seconds <= LONGEST_TIMEOUT_S:
            remedy = f"Give more than 0 s and at most {LONGEST_TIMEOUT_S:g} s."
            raise InvalidArgument(field="timeout", value=seconds, problem="is no time for a verb", remedy=remedy)
        snapshot = await self._leader.snapshot()
        worker = orders.worker_named(snapshot, worker_id)
        _check_reachable(snapshot, worker)
        if verb == "resume":
            answer = await self._send(worker, verb, args, seconds)
            await self._leader.execute(lambda s, now: orders.resume_worker(s, worker_id, now))
            return answer
        if verb != "pause":
            return await self._send(worker, verb, args, seconds)
        await self._leader.execute(lambda s, now: orders.pause_worker(s, worker_id, now))
        await self._until_closed(worker_id, seconds)
        try:
            return await self._send(worker, verb, args, seconds)
        except (Unimplemented, InvalidArgument):
            await self._leader.execute(lambda s, now: orders.resume_worker(s, worker_id, now))
            raise

    async def _until_closed(self, worker_id: str, bound_s: float) -> None:
        """The node has acted on the pause: its shim refuses. Raises Unavailable; the pause stays recorded."""
        end = asyncio.get_running_loop().time() + bound_s
        while True:
            snapshot = await self._leader.snapshot()
            worker = orders.worker_named(snapshot, worker_id)
            report = report_of(snapshot, worker)
            acted = report is not None and report.generation >= worker.intent.generation
            if acted and report is not None and report.phase is ReportedPhase.PAUSED:
                return
            if asyncio.get_running_loop().time() > end:
                raise Unavailable(
                    f"node {worker.intent.node_id} has not closed worker {worker_id} within {bound_s:g} s.",
                    reason="VERB_TIMEOUT",
                    remedy="It is paused as soon as its node answers.",
                )
            await asyncio.sleep(_LOOK_S)

    async def _send(self, worker: Worker, verb: str, args: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        node_id, incarnation = worker.intent.node_id, worker.observed.incarnation
        return await self._verbs.perform(node_id, worker.worker_id, incarnation, verb, args, timeout_s)


def _check_reachable(snapshot: Snapshot, worker: Worker) -> None:
    if worker.state is State.INACTIVE and not worker.asleep:
        raise FailedPrecondition(
            f"worker {worker.worker_id!r} has no engine: it is {worker.state}/{worker.intent.phase}.",
            reason="NO_ENGINE",
            field="worker_id",
            value=worker.worker_id,
            remedy="Activate it first.",
        )
    live = snapshot.live.nodes.get(worker.intent.node_id)
    if live is None or not live.connected:
        raise Unavailable(
            f"node {worker.intent.node_id!r} of worker {worker.worker_id!r} is not connected.",
            reason="NODE_NOT_CONNECTED",
            retry_after_s=1.0,
        )
