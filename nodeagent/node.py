"""The node as a whole: its workers, what each is told, and what is reported of all."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping

from nodeagent import marks
from nodeagent.core.converge import Verdict, converge, may_forget
from nodeagent.ledger import LedgerEntry
from nodeagent.setup import NodeSetup
from nodeagent.verb_desk import Answer, VerbDesk
from nodeagent.worker import Worker
from springtide import processes
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import WorkerReport
from springtide.v1 import agent_pb2

log = logging.getLogger(__name__)

_REFRESH_S = 0.4
_STRAYS_S = 10.0
_DEAD = (ReportedPhase.STOPPED, ReportedPhase.FAILED)


class Node:
    """Holds one `Worker` and one task for each worker id. `idle` is set while no worker may have a process."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refreshing: dict[str, asyncio.Task[None]] = {}
        self._leaving = False
        self._ignored: dict[str, tuple[int, str]] = {}
        self._verbs = VerbDesk(self._workers)
        setup.used_by_others = self._used_by_others
        self.idle = asyncio.Event()
        self.idle.set()

    def _used_by_others(self, gpu_id: str, worker_id: str) -> bool:
        others = (worker for name, worker in self._workers.items() if name != worker_id)
        return any(w.live and not w.asleep and gpu_id in w.known().gpu_ids for w in others)

    def take_verbs(self, orders: Iterable[agent_pb2.VerbOrder], answer: Answer) -> None:
        """Does what is not done yet; an order that is sent again is answered again."""
        self._verbs.take(orders, answer)

    def on_change(self, call: Callable[[], None]) -> None:
        """Sets who is told of changes."""

        def changed() -> None:
            if not any(worker.live for worker in self._workers.values()):
                self.idle.set()
            else:
                self.idle.clear()
            call()

        self._setup.changed = changed

    async def adopt(self) -> None:
        """At the agent's start: takes over what the ledger knows, ends what carries our mark and is in no ledger."""
        entries = {entry.worker_id: entry for entry in self._setup.ledger.read_all()}
        await self._end_strays(entries)
        for entry in entries.values():
            self._add(entry)

    async def _end_strays(self, entries: dict[str, LedgerEntry]) -> None:
        pause_s, waited_s = 0.05, 0.0
        while strays := [
            identity
            for identity, env in await asyncio.to_thread(marks.marked, self._setup.marker)
            if identity.pid != os.getpid() and not _belongs(env, entries)
        ]:
            for identity in strays:
                log.warning("process %d is in no ledger and is ended", identity.pid, extra={"reason": "STRAY"})
                processes.kill(identity)
            if waited_s > _STRAYS_S:
                log.error("stray processes do not end: %s", [identity.pid for identity in strays])
                return
            await asyncio.sleep(pause_s)
            waited_s += pause_s

    def _add(self, entry: LedgerEntry) -> Worker:
        worker = Worker(self._setup, entry)
        self._workers[entry.worker_id] = worker
        self._tasks[entry.worker_id] = asyncio.create_task(worker.run())
        return worker

    def apply(self, store_id: str, desired: Iterable[DesiredWorker]) -> None:
        """Follows the desired state of one store. Workers that it does not name go on as they are."""
        if self._leaving:
            return
        listed = [worker for worker in desired if not worker.worker_id.startswith(".")]  # it names a folder
        known = {worker_id: worker.known() for worker_id, worker in self._workers.items()}
        for step in converge(store_id, listed, known, self._setup.gpu_ids):
            wanted = step.desired
            if step.verdict is Verdict.IGNORE:
                self._log_ignored(wanted, step.reason, step.message)
                continue
            self._ignored.pop(wanted.worker_id, None)
            worker = self._workers.get(wanted.worker_id) or self._add(_blank(store_id, wanted))
            if step.verdict is Verdict.FOLLOW:
                worker.follow(store_id, wanted)
            else:
                worker.refuse(store_id, wanted, step.reason, step.message)
        self._forget(store_id, {worker.worker_id for worker in listed})

    def _log_ignored(self, wanted: DesiredWorker, reason: str, message: str) -> None:
        """Desired state is sent again and again; one line says it all."""
        key = (wanted.generation, reason)
        if self._ignored.get(wanted.worker_id) != key:
            self._ignored[wanted.worker_id] = key
            log.warning("order for worker %s is ignored: %s", wanted.worker_id, message, extra={"reason": reason})

    def _forget(self, store_id: str, desired_ids: set[str]) -> None:
        for worker_id, worker in list(self._workers.items()):
            if worker.end_was_reported and may_forget(store_id, worker.known(), desired_ids):
                self._workers.pop(worker_id)
                self._tasks.pop(worker_id).cancel()
                self._ignored.pop(worker_id, None)
                self._setup.ledger.forget(worker_id)

    async def refresh(self) -> None:
        """Reads the counts of all shims, for at most a moment: an old count is better than a late heartbeat. A shim
        that is slower is heard for the next one, not asked again and again in vain."""
        for worker_id, worker in self._workers.items():
            if worker.live and worker_id not in self._refreshing:
                self._refreshing[worker_id] = asyncio.ensure_future(self._refresh(worker_id, worker))
        if self._refreshing:
            await asyncio.wait(list(self._refreshing.values()), timeout=_REFRESH_S)

    async def _refresh(self, worker_id: str, worker: Worker) -> None:
        try:
            await worker.refresh()
        finally:
            self._refreshing.pop(worker_id, None)

    def reports(self) -> tuple[WorkerReport, ...]:
        """All workers, for a heartbeat that is about to be sent."""
        reports = tuple(worker.report() for _, worker in sorted(self._workers.items()))
        for report in reports:
            if report.phase in _DEAD:
                self._workers[report.worker_id].end_was_reported = True
        self._setup.metrics.reports = reports
        known = ((worker.entry, worker.links) for _, worker in sorted(self._workers.items()))
        self._setup.metrics.links = {(e.pool, e.worker_id): links for e, links in known if links is not None}
        return reports

    @property
    def live_workers(self) -> int:
        """Workers that may have a process."""
        return sum(worker.live for worker in self._workers.values())

    def serves(self, store_id: str) -> bool:
        """Whether a live worker was asked for by this store: only then its control plane will drain anything here."""
        return any(worker.live and worker.store_id == store_id for worker in self._workers.values())

    @property
    def drained(self) -> bool:
        """No shim admits anything and no request runs, as far as every worker is known."""
        return all(worker.drained for worker in self._workers.values())

    def drain_all(self) -> None:
        """The agent leaves and no control plane says how: every shim refuses new requests from now on."""
        self._leaving = True
        for worker in self._workers.values():
            worker.drain_for_good()

    def stop_all(self, *, kill: bool = False) -> None:
        """The agent leaves: everything is stopped, whatever is wanted."""
        self._leaving = True
        for worker in self._workers.values():
            worker.stop_for_good(kill=kill)
        self._setup.changed()

    async def close(self) -> None:
        """Ends the tasks; shims and engines are left as they are."""
        await self._verbs.close()
        tasks = [*self._tasks.values(), *self._refreshing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _blank(store_id: str, wanted: DesiredWorker) -> LedgerEntry:
    """A worker that this node has not had yet."""
    return LedgerEntry(
        worker_id=wanted.worker_id,
        pool=wanted.pool,
        store_id=store_id,
        generation=0,
        want=wanted.want or Want.RUN,
        launch=wanted.launch if wanted.launch.engine else EngineLaunch(engine=""),
    )


def _belongs(env: Mapping[str, str], entries: dict[str, LedgerEntry]) -> bool:
    """Whether a marked process is one of a live entry's present incarnation."""
    entry = entries.get(env.get(marks.WORKER, ""))
    return entry is not None and entry.live and env.get(marks.INCARNATION) == str(entry.incarnation)
