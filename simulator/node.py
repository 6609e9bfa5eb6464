"""A modelled node: its GPUs, its engines, and the agent that follows orders by nodeagent.core.

The engines belong to the node, the sessions and targets to the agent: an agent may die and come back, the node may be
switched off, and its clock may be wrong.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from nodeagent.core.converge import Verdict, converge, may_forget
from simulator.agenda import Agenda
from simulator.controlplane import ModelControlPlane
from simulator.network import Network
from simulator.performance import Constants, Performance
from simulator.sessions import AgentSession, agent_hello
from simulator.shim import DRAINING, Shim
from simulator.worker import ModelWorker
from springtide.model.desired import DesiredWorker
from springtide.model.enums import ReportedPhase, Want
from springtide.model.node import Gpu, NodeObserved
from springtide.model.worker import ExitInfo
from springtide.wire.agent import Heartbeat, Hello

_SILENCE_S = 3.0  # without a word from the control plane: a new session
_ENDED = (ReportedPhase.STOPPED, ReportedPhase.FAILED)


@dataclass(slots=True)
class NodeModel:
    """What a node is like. Times in seconds; `fail_starts`, `never_ready` and `never_stops` are faults."""

    gpus: int = 8
    labels: dict[str, str] = field(default_factory=dict)
    resources: dict[str, int] = field(default_factory=dict)
    start_s: float = 20.0
    start_jitter_s: float = 0.0
    stop_s: float = 0.5
    adopt_s: float = 0.5
    drain_check_interval_s: float | None = None  # None: a worker that becomes idle is reported at once
    fail_starts: bool = False
    never_ready: bool = False
    never_stops: bool = False
    sleep_s: float = 0.3
    wake_s: float = 0.5


class ModelNode:
    """`spawned(node, worker)` and `freed` tell the world about processes; `endpoints` is where routers find shims."""

    def __init__(
        self,
        node_id: str,
        agenda: Agenda,
        network: Network,
        control: ModelControlPlane,
        rng: random.Random,
        endpoints: dict[str, Shim],
        model: NodeModel | None = None,
        performance: Performance | None = None,
        heartbeat_interval_s: float = 1.0,
        spawned: Callable[["ModelNode", ModelWorker], None] = lambda node, worker: None,
    ) -> None:
        self.node_id = node_id
        self.agenda = agenda
        self.network = network
        self.control = control
        self.rng = rng
        self.endpoints = endpoints
        self.model = model or NodeModel()
        self.performance = performance or Constants()
        self.heartbeat_interval_s = heartbeat_interval_s
        self.spawned = spawned
        self.awake: Callable[[ModelNode, ModelWorker], None] = lambda node, worker: None
        self.workers: dict[str, ModelWorker] = {}
        self.agent_up = False
        self.power = True
        self.ended = False  # taken back by its provisioner: it never comes again
        self.skew_s = 0.0
        self.stopping = False
        self.stop_deadline_at: float | None = None
        self.life = 0
        self._session: AgentSession | None = None
        self._session_id = ""
        self._heard_at = 0.0
        self._sequence = 0
        self._ports = 10_000
        self._report_due = False
        self._followed: tuple[DesiredWorker, ...] | None = None

    # ------------------------------------------------------------ the agent's life

    def start_agent(self) -> None:
        if self.ended:
            return
        self.agent_up = True
        self.life += 1
        self._session = None
        self._session_id = f"{self.node_id}-{self.life}"
        self._followed = None
        for worker in self.workers.values():
            worker.forget_memory()
            if worker.adopting:
                self.agenda.after(self.model.adopt_s, self._adopted, self.life, worker, worker.shim)
        self._hello()
        self.agenda.after(self.heartbeat_interval_s, self._tick, self.life)

    def crash_agent(self, *, noticed: bool = True) -> None:
        """The agent dies; shims and engines go on. `noticed`: its connection is closed by the kernel."""
        self.agent_up = False
        self.life += 1
        if noticed and self._session is not None:
            self.network.send(self.node_id, self._session.end)
        self._session = None

    def switch_off(self) -> None:
        """Agent and engines die without a word."""
        self.crash_agent(noticed=False)
        self.power = False
        for worker in self.workers.values():
            if worker.shim is not None:
                self._lose(worker, ExitInfo(reason="NODE_RESTARTED", message="the node went down"))

    def switch_on(self) -> None:
        self.power = True
        self.stopping, self.stop_deadline_at = False, None
        self.start_agent()

    def preempt(self, notice_s: float | None) -> None:
        """The node announces that it stops, in `notice_s` seconds or when it is empty."""
        self.stopping = True
        self.stop_deadline_at = None if notice_s is None else self.agenda.now + notice_s
        self._beat()

    def goodbye(self) -> None:
        """The agent ends in good order, and its workers with it."""
        for worker in self.workers.values():
            if worker.shim is not None:
                worker.stopping = True
                self._lose(worker, None)
        self._beat()
        if self._session is not None:
            self.network.send(self.node_id, self._session.goodbye)
        self.crash_agent(noticed=False)

    def _adopted(self, life: int, worker: ModelWorker, shim: Shim) -> None:
        if life != self.life or worker.shim is not shim:
            return
        worker.adopting = False
        if worker.want is Want.STOP:
            self.stop(worker, kill=False)
        elif not worker.warm and not worker.asleep:
            self._await_ready(worker, shim)
        self.changed(worker)
        worker.act()

    # ------------------------------------------------------------ sessions

    def _hello(self) -> None:
        gpus = tuple(Gpu(str(index), simulated=True) for index in range(self.model.gpus))
        observed = NodeObserved(
            boot_id="boot",
            address=self.node_id,
            gpus=gpus,
            labels=self.model.labels,
            resources=self.model.resources,
        )
        self._heard_at = self.agenda.now
        self.network.send(
            self.node_id, agent_hello, self.control, self, Hello(self.node_id, self._session_id, observed)
        )

    def welcome(self, session: AgentSession) -> None:
        if not self.agent_up or (self._session is not None and session.connection < self._session.connection):
            return
        self._session = session
        self._heard_at = self.agenda.now
        self._beat()

    def refused(self) -> None:
        """Another agent holds the node id: the old session's end was not noticed yet. Asked again later."""

    def register_again(self) -> None:
        if self.agent_up and self._session is not None and not self._session.current:
            self._session = None
            self._hello()

    def _tick(self, life: int) -> None:
        if life != self.life or not self.agent_up:
            return
        if self._session is None or self.agenda.now - self._heard_at > _SILENCE_S:
            self._session = None
            self._hello()
        else:
            self._beat()
        self.agenda.after(self.heartbeat_interval_s, self._tick, life)

    def _beat(self) -> None:
        if self._session is None or not self.agent_up:
            return
        self._sequence += 1
        reports = tuple([self.workers[worker_id].report() for worker_id in sorted(self.workers)])
        for report in reports:
            if report.phase in _ENDED and not self.workers[report.worker_id].end_was_reported:
                self._followed = None  # what follows may forget it
                self.workers[report.worker_id].end_was_reported = True
        left_s = None if self.stop_deadline_at is None else self.stop_deadline_at - self.agenda.now
        beat = Heartbeat(self._sequence, reports, self.stopping, left_s)
        self.network.send(self.node_id, self._session.heartbeat, beat)

    def desired(self, store_id: str, revision: int, wanted: tuple[DesiredWorker, ...]) -> None:
        """Orders have arrived."""
        if not self.agent_up:
            return
        self._heard_at = self.agenda.now
        if wanted is self._followed:
            return  # the very same orders, and nothing has ended since
        self._followed = wanted
        known = {worker_id: worker.known() for worker_id, worker in self.workers.items()}
        gpu_ids = [str(index) for index in range(self.model.gpus)]
        for step in converge(store_id, wanted, known, gpu_ids):
            if step.verdict is Verdict.IGNORE:
                continue
            order = step.desired
            worker = self.workers.get(order.worker_id)
            if worker is None:
                worker = self.workers[order.worker_id] = ModelWorker(self, store_id, order)
            if step.verdict is Verdict.FOLLOW:
                worker.follow(store_id, order)
            else:
                worker.refuse(store_id, order, step.reason, step.message)
        listed = {order.worker_id for order in wanted}
        for worker_id, worker in list(self.workers.items()):
            if worker.end_was_reported and may_forget(store_id, worker.known(), listed):
                del self.workers[worker_id]

    def changed(self, worker: ModelWorker) -> None:
        """Something is worth a report: one for all that happens at this instant."""
        self._followed = None
        if self.agent_up and not self._report_due:
            self._report_due = True
            self.agenda.at(self.agenda.now, self._report, self.life)

    def _report(self, life: int) -> None:
        self._report_due = False
        if life == self.life:
            self._beat()

    # ------------------------------------------------------------ processes

    def spawn(self, worker: ModelWorker) -> None:
        self._ports += 1
        unix_ms = int((self.agenda.now + self.skew_s) * 1000)
        worker.incarnation = max(worker.incarnation + 1, unix_ms)
        worker.started_generation = worker.generation
        worker.gpu_ids = worker.launch.gpu_ids
        target = worker.target
        sourced = target is not None and target.weight_source
        worker.weight_version = target.weight_version if target and sourced else worker.launch.weight_version
        worker.stopped = worker.stopping = worker.warm = worker.adopting = worker.asleep = False
        worker.changing = ""
        worker.start_phase = ReportedPhase.BOOTING
        worker.probe_failures = 0
        endpoint = f"{self.node_id}:{self._ports}"
        shim = Shim(
            self.agenda,
            worker.worker_id,
            worker.incarnation,
            endpoint,
            self.performance,
            worker.launch.max_in_flight,
        )
        shim.on_idle = lambda: self._idle(worker, shim)
        worker.shim = self.endpoints[endpoint] = shim
        worker.idle_seen = True
        self.spawned(self, worker)
        start_s = self.model.start_s + self.rng.random() * self.model.start_jitter_s
        if self.model.fail_starts:
            info = ExitInfo(code=1, reason="ENGINE_EXITED", message="the engine ended while it loaded")
            self.agenda.after(start_s * 0.5, self.engine_ends, worker, shim, info)
        elif not self.model.never_ready:
            shim.ready_at = self.agenda.now + start_s
        self._await_ready(worker, shim)
        self.changed(worker)

    def _await_ready(self, worker: ModelWorker, shim: Shim) -> None:
        self.agenda.after(min(0.1, self.model.start_s * 0.1), self._loading, self.life, worker, shim)
        if shim.ready_at is not None:
            self.agenda.at(shim.ready_at, self._ready, self.life, worker, shim)

    def _loading(self, life: int, worker: ModelWorker, shim: Shim) -> None:
        if life == self.life and worker.shim is shim and not worker.warm:
            worker.start_phase = ReportedPhase.LOADING
            self.changed(worker)

    def _ready(self, life: int, worker: ModelWorker, shim: Shim) -> None:
        if life != self.life or worker.shim is not shim or not shim.alive or worker.stopping:
            return
        worker.warm = True
        worker.start_phase = ReportedPhase.WARMING
        worker.act()
        self.changed(worker)

    def stop(self, worker: ModelWorker, *, kill: bool) -> None:
        shim = worker.shim
        if shim is None or (worker.stopping and not kill):
            return
        worker.stopping = True
        shim.set_admission(DRAINING)
        self.changed(worker)
        if not self.model.never_stops or kill:
            self.agenda.after(0.0 if kill else self.model.stop_s, self.engine_ends, worker, shim, None)

    def engine_ends(self, worker: ModelWorker, shim: Shim, info: ExitInfo | None) -> None:
        """The process group is gone: as told, or (`info`) by itself."""
        if worker.shim is shim and shim.alive:
            self._lose(worker, info)

    def _lose(self, worker: ModelWorker, info: ExitInfo | None) -> None:
        shim = worker.shim
        assert shim is not None
        self.endpoints.pop(shim.endpoint, None)
        shim.die()
        if self.agent_up:
            worker.ended(info)
        else:
            _note_end(worker, info)

    # ------------------------------------------------------------ sleep

    def sleep(self, worker: ModelWorker) -> None:
        """Its memory is released after a while, if nothing comes in between."""
        self._change(worker, "sleep", self.model.sleep_s, self._slept)

    def wake(self, worker: ModelWorker) -> None:
        """Its memory is taken at once, and it serves after a while."""
        worker.asleep = False
        self.awake(self, worker)
        self._change(worker, "wake", self.model.wake_s, self._woken)

    def load_weights(self, worker: ModelWorker, version: str) -> None:
        """Other weights after a while."""

        def done(worker: ModelWorker) -> None:
            worker.weight_version = version

        self._change(worker, "weights", self.model.wake_s, done)

    def _change(self, worker: ModelWorker, name: str, seconds: float, done: Callable[[ModelWorker], None]) -> None:
        life, shim = self.life, worker.shim
        worker.changing = name

        def end() -> None:
            if life == self.life and worker.shim is shim and worker.changing == name and not worker.stopping:
                worker.changing = ""
                done(worker)
                self.changed(worker)
                worker.act()

        self.agenda.after(seconds, end)
        self.changed(worker)

    def _slept(self, worker: ModelWorker) -> None:
        worker.asleep, worker.warm = True, False

    def _woken(self, worker: ModelWorker) -> None:
        worker.warm = True

    # ------------------------------------------------------------ drains

    def drain_began(self, worker: ModelWorker) -> None:
        """Whether it is idle is seen at once, or (seed 4) at the start of the drain and once per check interval."""
        if self.model.drain_check_interval_s is not None:
            worker.idle_seen = False
            self._check_drain(worker, worker.shim)

    def _check_drain(self, worker: ModelWorker, shim: Shim | None) -> None:
        interval_s = self.model.drain_check_interval_s
        if shim is None or worker.shim is not shim or shim.admission != DRAINING or interval_s is None:
            return
        if shim.in_flight == 0:
            worker.idle_seen = True
            self.changed(worker)
        else:
            self.agenda.after(interval_s, self._check_drain, worker, shim)

    def _idle(self, worker: ModelWorker, shim: Shim) -> None:
        if worker.shim is shim and worker.idle_seen:
            self.changed(worker)
        if worker.shim is shim and self.agent_up and worker.want is not Want.DRAIN:
            worker.act()


def _note_end(worker: ModelWorker, info: ExitInfo | None) -> None:
    """An end that no agent saw: found when the next one looks."""
    worker.shim = None
    worker.gpu_ids = ()
    worker.stopped = worker.want is Want.STOP
    worker.exit = None if worker.stopped else info or ExitInfo(reason="ENGINE_EXITED")
    if not worker.stopped:
        worker.started_generation = worker.generation
    worker.stopping = worker.warm = worker.adopting = worker.asleep = False
    worker.changing = ""
