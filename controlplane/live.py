"""What the leader hears: sessions of agents and routers, their last reports, samples. In memory only, starts unknown.

One event loop owns it; nothing here waits. Methods that take news return the keys of what changed so much that the
leader should look at once; an empty answer means that its next look is soon enough.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.core.measured import KEPT as START_UPS_KEPT
from controlplane.core.snapshot import LiveView, LoadSample, NodeLive, PoolDemand, RouterLive
from controlplane.provisioners import Provisioners
from springtide.errors import AlreadyExists, Exhausted
from springtide.model.enums import ReportedPhase
from springtide.model.node import NodeObserved
from springtide.model.record import Decision
from springtide.model.routing import NeedReport, RouterReport
from springtide.model.worker import WorkerReport
from springtide.wire.agent import Heartbeat, Hello

MAX_NODES = 4096
MAX_ROUTERS = 256
_SOONER_S = 1.0  # less is the same deadline, told again
SAMPLES_KEPT = 1536
FORGET_ROUTER_S = 60.0  # a router that has been gone for so long is no longer shown
RIVAL_HEARTBEATS = 3  # a session heard within so many intervals defends its node id
RIVAL_ROUTER_S = 3.0  # the same of routers, which report every second


@dataclass(slots=True)
class NodeSession:
    """One node as its agent reports it. `connection` counts its sessions: a late end of an earlier one is ignored."""

    session_id: str
    hello: NodeObserved
    last_heard_at: float
    connection: int
    connected: bool = True
    stopping: bool = False
    stop_deadline_at: float | None = None
    stop_reason: str = ""
    goodbye: bool = False
    reported: bool = False
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)


@dataclass(slots=True)
class RouterSession:
    session_id: str
    last_heard_at: float
    connection: int
    connected: bool = True
    acked_revision: int = 0
    demand: Mapping[str, PoolDemand] = field(default_factory=dict)


class Live:
    """The leader's memory."""

    def __init__(self, heartbeat_interval_s: float) -> None:
        self.nodes: dict[str, NodeSession] = {}
        self.routers: dict[str, RouterSession] = {}
        self.provisioners = Provisioners(heartbeat_interval_s)
        self.last_decision: dict[str, Decision] = {}
        self._evaluated_at: dict[str, float] = {}
        self._start_ups_s: dict[str, deque[float]] = {}
        self._samples: dict[str, deque[LoadSample]] = {}
        self._views: dict[str, tuple[LoadSample, ...]] = {}  # of samples, made once for each that is taken
        self._heartbeat_interval_s = heartbeat_interval_s
        self._connections = 0

    # ------------------------------------------------------------------ agents

    def node_hello(self, hello: Hello, now: float) -> int:
        """Begins a session and returns its connection number.

        Raises AlreadyExists while a session with another id holds the node, Exhausted for too many nodes.
        """
        known = self.nodes.get(hello.node_id)
        if known is not None and known.session_id != hello.session_id and self._alive(known, now):
            raise AlreadyExists(
                f"node {hello.node_id!r} is held by another agent, last heard {now - known.last_heard_at:.1f} s ago.",
                reason="NODE_ID_TAKEN",
                field="hello.node_id",
                value=hello.node_id,
                remedy="Give this agent a node_id of its own, or stop the other one.",
            )
        if known is None and len(self.nodes) >= MAX_NODES:
            raise Exhausted(f"{MAX_NODES} nodes are connected, which is the most.", reason="TOO_MANY_NODES")
        self._connections += 1
        self.nodes[hello.node_id] = NodeSession(hello.session_id, hello.observed, now, self._connections)
        return self._connections

    def heartbeat(self, node_id: str, connection: int, heartbeat: Heartbeat, now: float) -> set[str]:
        """Takes a heartbeat over. Keys of what changed; {} also for a connection that is no longer this node's."""
        session = self.nodes.get(node_id)
        if session is None or session.connection != connection:
            return set()
        news: set[str] = set()
        deadline_at = None if heartbeat.stop_deadline_s is None else now + heartbeat.stop_deadline_s
        if not session.reported or heartbeat.stopping != session.stopping:
            news.add(f"node/{node_id}")
        reports = {report.worker_id: report for report in heartbeat.reports}
        for worker_id in reports.keys() | session.reports.keys():
            if _matters(session.reports.get(worker_id), reports.get(worker_id)):
                news.add(f"worker/{worker_id}")
        session.last_heard_at = now
        session.reports = reports
        session.reported = True
        known = session.stop_deadline_at
        sooner = known is None or (deadline_at is not None and deadline_at < known - _SOONER_S)
        if not (heartbeat.stopping and session.stopping) or sooner:  # else the first deadline stands
            session.stop_deadline_at = deadline_at
            if heartbeat.stopping:
                news.add(f"node/{node_id}")
        session.stopping = heartbeat.stopping
        session.stop_reason = heartbeat.stop_reason
        return news

    def is_current(self, node_id: str, connection: int) -> bool:
        session = self.nodes.get(node_id)
        return session is not None and session.connection == connection

    def node_goodbye(self, node_id: str, connection: int) -> None:
        if self.is_current(node_id, connection):
            self.nodes[node_id].goodbye = True

    def node_gone(self, node_id: str, connection: int) -> None:
        """The stream of that connection has ended."""
        if self.is_current(node_id, connection):
            self.nodes[node_id].connected = False

    def _alive(self, session: NodeSession, now: float) -> bool:
        return session.connected and now - session.last_heard_at <= RIVAL_HEARTBEATS * self._heartbeat_interval_s

    # ------------------------------------------------------------------ routers

    def router_hello(self, router_id: str, session_id: str, acked_revision: int, now: float) -> int:
        """Begins a session and returns its connection number.

        Raises AlreadyExists while another live router has the id: what the two hold back would pass for one's.
        Raises Exhausted for too many routers.
        """
        for gone in [key for key, session in self.routers.items() if _forgotten(session, now)]:
            del self.routers[gone]
        rival = self.routers.get(router_id)
        if rival is not None and rival.session_id != session_id and _defends(rival, now):
            raise AlreadyExists(
                f"router {router_id!r} is another process, last heard {now - rival.last_heard_at:.1f} s ago.",
                reason="ROUTER_ID_TAKEN",
                field="hello.router_id",
                value=router_id,
                remedy="Give this router a router_id or a data_dir of its own, or stop the other one.",
            )
        if router_id not in self.routers and len(self.routers) >= MAX_ROUTERS:
            raise Exhausted(f"{MAX_ROUTERS} routers are connected, which is the most.", reason="TOO_MANY_ROUTERS")
        self._connections += 1
        known = self.routers.get(router_id)
        demand = known.demand if known is not None and known.session_id == session_id else {}
        self.routers[router_id] = RouterSession(
            session_id, now, self._connections, acked_revision=acked_revision, demand=demand
        )
        return self._connections

    def router_ack(self, router_id: str, connection: int, revision: int, now: float) -> set[str]:
        session = self.routers.get(router_id)
        if session is None or session.connection != connection:
            return set()
        session.last_heard_at = now
        if revision <= session.acked_revision:
            return set()
        session.acked_revision = revision
        return {f"router/{router_id}"}

    def router_report(self, router_id: str, connection: int, report: RouterReport, now: float) -> set[str]:
        """A pool's first waiting or rejected request is news at once."""
        session = self.routers.get(router_id)
        if session is None or session.connection != connection:
            return set()
        session.last_heard_at = now
        before = session.demand
        session.demand = {
            pool.pool: PoolDemand(
                pool.waiting,
                pool.rejected,
                pool.oldest_wait_s,
                requests_total=pool.requests_total,
                ttft_p50_s=pool.ttft_p50_s,
                ttft_p99_s=pool.ttft_p99_s,
                by_needs={_keys(need): need.tasks for need in pool.by_needs},
            )
            for pool in report.pools
        }
        return {f"pool/{name}" for name, demand in session.demand.items() if _is_news(demand, before.get(name))}

    def router_gone(self, router_id: str, connection: int) -> None:
        session = self.routers.get(router_id)
        if session is not None and session.connection == connection:
            session.connected = False

    # ------------------------------------------------------------------ the leader's own

    def sampled(self, samples: Mapping[str, LoadSample]) -> None:
        for pool, sample in samples.items():
            self._samples.setdefault(pool, deque(maxlen=SAMPLES_KEPT)).append(sample)
            self._views.pop(pool, None)

    def evaluated(self, pools: Iterable[str], now: float) -> None:
        self._evaluated_at.update(dict.fromkeys(pools, now))

    def started(self, start_ups_s: Mapping[str, Iterable[float]]) -> None:
        for pool, seconds in start_ups_s.items():
            self._start_ups_s.setdefault(pool, deque(maxlen=START_UPS_KEPT)).extend(seconds)

    def decided(self, decisions: Iterable[Decision]) -> None:
        self.last_decision.update({decision.pool: decision for decision in decisions})

    def forget(self, pools: Iterable[str], nodes: Iterable[str]) -> None:
        """Drops what belongs to no record any more. Connected nodes stay: their record is yet to come."""
        kept = set(pools)
        for part in (self._samples, self._views, self._evaluated_at, self._start_ups_s, self.last_decision):
            for name in [name for name in part if name not in kept]:
                del part[name]
        known = set(nodes)
        for node_id in [key for key, session in self.nodes.items() if not session.connected and key not in known]:
            del self.nodes[node_id]

    def view(self) -> LiveView:
        """An unchanging copy."""
        for pool, samples in self._samples.items():
            if pool not in self._views:
                self._views[pool] = tuple(samples)
        return LiveView(
            nodes={node_id: _node_live(session) for node_id, session in self.nodes.items()},
            routers={router_id: _router_live(session) for router_id, session in self.routers.items()},
            samples=dict(self._views),
            evaluated_at=dict(self._evaluated_at),
            last_decision=dict(self.last_decision),
            start_ups_s={pool: tuple(seconds) for pool, seconds in self._start_ups_s.items()},
            provisioners=self.provisioners.view(),
        )


def _node_live(session: NodeSession) -> NodeLive:
    return NodeLive(
        connected=session.connected,
        last_heard_at=session.last_heard_at,
        session_id=session.session_id,
        hello=session.hello,
        stopping=session.stopping,
        stop_deadline_at=session.stop_deadline_at,
        stop_reason=session.stop_reason,
        goodbye=session.goodbye,
        reports=session.reports,
        reported=session.reported,
    )


def _router_live(session: RouterSession) -> RouterLive:
    return RouterLive(session.connected, session.last_heard_at, session.acked_revision, session.demand)


def _keys(need: NeedReport) -> str:
    """What a request asks for as capability keys: labels with their values."""
    return ",".join(f"{name}={value}" for name, value in need.labels)


def _is_news(demand: PoolDemand, before: PoolDemand | None) -> bool:
    """The first that is wanted of the pool, or the first for labels that nobody asked for before."""
    if _wants(demand) > 0 >= _wants(before):
        return True
    known = before.by_needs if before is not None else {}
    return any(needs and needs not in known for needs in demand.by_needs)


def _wants(demand: PoolDemand | None) -> int:
    return 0 if demand is None else demand.waiting + demand.rejected


def _defends(session: RouterSession, now: float) -> bool:
    return session.connected and now - session.last_heard_at <= RIVAL_ROUTER_S


def _forgotten(session: RouterSession, now: float) -> bool:
    return not session.connected and now - session.last_heard_at > FORGET_ROUTER_S


def _matters(before: WorkerReport | None, after: WorkerReport | None) -> bool:
    """Loads that only move are for the next sample; everything else, and a draining worker that becomes idle, is
    news."""
    if before is None or after is None or before is after:
        return before is not after
    if after.in_flight == 0 and before.in_flight != 0 and after.phase is ReportedPhase.DRAINING:
        return True
    return _facts(before) != _facts(after)


def _facts(report: WorkerReport) -> tuple[object, ...]:
    return (
        report.phase,
        report.generation,
        report.incarnation,
        report.store_id,
        report.endpoint,
        report.exit,
        report.engine_idle and report.phase is ReportedPhase.DRAINING,  # what a drain ends with; else idle is load
        report.weight_version,
        report.probe_failures,
        report.freed_bytes,
        report.reoccupied_bytes,
        report.verbs_known,
        report.start_phases_s,
        report.confinement,
    )
