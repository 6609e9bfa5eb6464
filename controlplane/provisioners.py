"""What the leader hears of provisioners: their sessions and last reports. In memory only, starts unknown.

A part of controlplane.live, with the same rules: one event loop owns it, and news are answered with keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.core.snapshot import ProvisionerLive
from springtide.errors import AlreadyExists, Exhausted
from springtide.model.provisioning import CapabilitySet, GroupAnswer, ProvidedNode, ProvisionerReport
from springtide.model.provisioning import ProvidedPhase as Phase
from springtide.wire.provisioner import MAX_NODES, ProvisionerHello

MAX_PROVISIONERS = 64
RIVAL_REPORTS = 3  # a session heard within so many intervals, or so many seconds, defends its id
ENDS_MOVED_S = 2.0  # a node's end that moves by less has not moved
ENDED_KEPT_S = 10.0  # the leader hears of an end that is listed for a shorter time than it takes for a look
FORGET_S = 3600.0  # one that has been gone for so long, and owns no node, is no longer shown


@dataclass(slots=True)
class Session:
    """One provisioner as it reports itself. What it said in an earlier session is shown, not acted on."""

    session_id: str
    kind: str
    version: str
    last_heard_at: float
    connection: int
    connected: bool = True
    reported: bool = False
    sets: Mapping[str, CapabilitySet] = field(default_factory=dict)
    nodes: Mapping[str, ProvidedNode] = field(default_factory=dict)
    ended: Mapping[str, tuple[float, ProvidedNode]] = field(default_factory=dict)  # when last listed, oldest first
    ends_at: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, GroupAnswer] = field(default_factory=dict)


class Provisioners:
    """`connection` numbers tell sessions apart: a late end of an earlier one is ignored."""

    def __init__(self, report_interval_s: float) -> None:
        self.sessions: dict[str, Session] = {}
        self._rival_s = RIVAL_REPORTS * max(1.0, report_interval_s)
        self._connections = 0

    def hello(self, hello: ProvisionerHello, now: float) -> int:
        """Begins a session and returns its connection number.

        Raises AlreadyExists while another live process has the id: both would answer for the same nodes. Raises
        Exhausted for too many provisioners.
        """
        known = self.sessions.get(hello.provisioner_id)
        if known is not None and known.session_id != hello.session_id and self._defends(known, now):
            raise AlreadyExists(
                f"provisioner {hello.provisioner_id!r} is another process, "
                f"last heard {now - known.last_heard_at:.1f} s ago.",
                reason="PROVISIONER_ID_TAKEN",
                field="hello.provisioner_id",
                value=hello.provisioner_id,
                remedy="Give this provisioner an id of its own, or stop the other one.",
            )
        if known is None and len(self.sessions) >= MAX_PROVISIONERS:
            raise Exhausted(
                f"{MAX_PROVISIONERS} provisioners are known, which is the most.", reason="TOO_MANY_PROVISIONERS"
            )
        self._connections += 1
        session = Session(hello.session_id, hello.kind, hello.version, now, self._connections)
        if known is not None:
            session.sets, session.nodes, session.ends_at = known.sets, known.nodes, known.ends_at
            session.ended = known.ended
        self.sessions[hello.provisioner_id] = session
        return self._connections

    def report(self, provisioner_id: str, connection: int, report: ProvisionerReport, now: float) -> set[str]:
        """Takes a report over, which replaces what was said before. Keys of what changed."""
        session = self.sessions.get(provisioner_id)
        if session is None or session.connection != connection:
            return set()
        before, ends_before = _facts(session), session.ends_at
        session.last_heard_at, session.reported = now, True
        session.sets = {found.name: found for found in report.capability_sets}
        session.ended = _lately_ended(session, report, now)
        ended = {node_id: node for node_id, (_, node) in session.ended.items()}
        session.nodes = ended | {node.node_id: node for node in report.nodes}
        session.ends_at = {node.node_id: now + node.ends_in_s for node in report.nodes if node.ends_in_s is not None}
        session.answers = {answer.request_id: answer for answer in report.answers if answer.request_id}
        changed = before != _facts(session) or _moved(ends_before, session.ends_at)
        return {f"provisioner/{provisioner_id}"} if changed else set()

    def is_current(self, provisioner_id: str, connection: int) -> bool:
        session = self.sessions.get(provisioner_id)
        return session is not None and session.connection == connection

    def gone(self, provisioner_id: str, connection: int) -> None:
        """The stream of that connection has ended."""
        if self.is_current(provisioner_id, connection):
            self.sessions[provisioner_id].connected = False

    def forget(self, owners: Iterable[str], now: float) -> None:
        """Drops those that are gone for long and own no node."""
        kept = set(owners)
        for key, session in list(self.sessions.items()):
            if not session.connected and key not in kept and now - session.last_heard_at > FORGET_S:
                del self.sessions[key]

    def view(self) -> dict[str, ProvisionerLive]:
        """An unchanging copy."""
        return {key: _live(session) for key, session in self.sessions.items()}

    def _defends(self, session: Session, now: float) -> bool:
        return session.connected and now - session.last_heard_at <= self._rival_s


def _live(session: Session) -> ProvisionerLive:
    return ProvisionerLive(
        connected=session.connected,
        last_heard_at=session.last_heard_at,
        kind=session.kind,
        version=session.version,
        reported=session.reported,
        sets=session.sets,
        nodes=session.nodes,
        ends_at=session.ends_at,
        answers=session.answers,
    )


def _lately_ended(session: Session, report: ProvisionerReport, now: float) -> dict[str, tuple[float, ProvidedNode]]:
    """Nodes that are listed as ended, and those that were: how a node ended is said in few reports, maybe in one."""
    listed = {node.node_id for node in report.nodes}
    kept = {
        node_id: (at, node)
        for node_id, (at, node) in session.ended.items()
        if node_id not in listed and now - at < ENDED_KEPT_S
    }
    kept |= {node.node_id: (now, node) for node in report.nodes if node.phase is Phase.ENDED}
    return dict(list(kept.items())[-MAX_NODES:])


def _facts(session: Session) -> tuple[object, ...]:
    """Without the seconds that are left, which move in each report."""
    nodes = {
        key: replace(node, ends_in_s=None) if node.ends_in_s is not None else node
        for key, node in session.nodes.items()
    }
    return session.reported, session.sets, nodes, session.answers


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    if before.keys() != after.keys():
        return True
    return any(abs(at - before[key]) > ENDS_MOVED_S for key, at in after.items())
