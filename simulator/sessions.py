"""The control plane's ends of the sessions with agents and routers: what the services do, on the agenda."""

from typing import Protocol

from simulator.controlplane import ModelControlPlane, Wake
from simulator.network import Stream
from springtide.errors import AlreadyExists
from springtide.model.desired import DesiredWorker
from springtide.model.routing import RouterReport, RoutingDelta, RoutingTable, WorkerLoad
from springtide.wire.agent import Heartbeat, Hello

LOADS_INTERVAL_S = 1.0


class Agent(Protocol):
    """What a node's agent hears."""

    node_id: str

    def welcome(self, session: "AgentSession") -> None: ...

    def refused(self) -> None: ...

    def desired(self, store_id: str, revision: int, wanted: tuple[DesiredWorker, ...]) -> None: ...

    def register_again(self) -> None: ...


class Router(Protocol):
    """What a router hears. `stream` tells which session a message belongs to."""

    router_id: str

    def table(self, stream: Stream, table: RoutingTable) -> None: ...

    def changes(self, stream: Stream, delta: RoutingDelta) -> None: ...

    def loads(self, stream: Stream, loads: tuple[WorkerLoad, ...]) -> None: ...


def agent_hello(control: ModelControlPlane, agent: Agent, hello: Hello) -> None:
    """A hello has arrived."""
    if not control.up or not control.hub.snapshot.store_id:
        return
    try:
        session = AgentSession(control, agent, hello)
    except AlreadyExists:
        control.network.send(agent.node_id, agent.refused)
        return
    control.network.send(agent.node_id, agent.welcome, session)


class AgentSession:
    """From a hello to the next one, or to the end of either process."""

    def __init__(self, control: ModelControlPlane, agent: Agent, hello: Hello) -> None:
        self._control = control
        self._agent = agent
        self._life = control.life
        self.connection = control.live.node_hello(hello, control.now())
        self._wake = Wake(control.agenda, self._push)
        control.hub.subscribe_node(agent.node_id, self._wake)
        self._wake.set()
        control.kick("node")

    @property
    def current(self) -> bool:
        control = self._control
        return control.up and control.life == self._life and self._is_newest()

    def _is_newest(self) -> bool:
        return self._control.live.is_current(self._agent.node_id, self.connection)

    def heartbeat(self, beat: Heartbeat) -> None:
        control = self._control
        if not self.current:
            if control.up:
                control.network.send(self._agent.node_id, self._agent.register_again)
            return
        control.kick(control.live.heartbeat(self._agent.node_id, self.connection, beat, control.now()))
        self._wake.set()

    def goodbye(self) -> None:
        if self.current:
            self._control.live.node_goodbye(self._agent.node_id, self.connection)
            self._control.kick("node")

    def end(self) -> None:
        """The stream has ended."""
        control = self._control
        if control.up and control.life == self._life:
            control.hub.unsubscribe_node(self._agent.node_id, self._wake)
            control.live.node_gone(self._agent.node_id, self.connection)
            control.kick("node")

    def _push(self) -> None:
        control, node_id = self._control, self._agent.node_id
        if not self.current:
            if control.life == self._life:
                control.hub.unsubscribe_node(node_id, self._wake)
            return
        shown = control.hub.snapshot
        wanted = control.hub.desired(node_id)
        control.network.send(node_id, self._agent.desired, shown.store_id, shown.revision, wanted)


class RouterSession:
    """One router's session: a table, then changes in order; loads every second."""

    def __init__(self, control: ModelControlPlane, router: Router, session_id: str, stream: Stream) -> None:
        self._control = control
        self._router = router
        self._life = control.life
        self.stream = stream
        self.connection = control.live.router_hello(router.router_id, session_id, 0, control.now())
        self._wake = Wake(control.agenda, self._push)
        control.hub.subscribe_router(self._wake)
        self._sent = control.hub.table
        stream.send(router.table, stream, self._sent)
        control.agenda.after(LOADS_INTERVAL_S, self._send_loads)

    @property
    def current(self) -> bool:
        control = self._control
        if not (control.up and control.life == self._life):
            return False
        known = control.live.routers.get(self._router.router_id)
        return known is not None and known.connection == self.connection

    def ack(self, store_id: str, revision: int) -> None:
        control = self._control
        if self.current:
            table = control.hub.table
            known = revision if store_id == table.store_id and revision <= table.revision else 0
            moved = control.live.router_ack(self._router.router_id, self.connection, known, control.now())
            if control.hub.awaits_acks:
                control.kick(moved)

    def report(self, report: RouterReport) -> None:
        control = self._control
        if self.current:
            control.kick(control.live.router_report(self._router.router_id, self.connection, report, control.now()))

    def end(self) -> None:
        control = self._control
        if control.up and control.life == self._life:
            if self._wake in control.hub._router_wakes:
                control.hub.unsubscribe_router(self._wake)
            control.live.router_gone(self._router.router_id, self.connection)
            control.kick("router")

    def _push(self) -> None:
        if not self._go_on() or self._control.hub.table is self._sent:
            return
        changes, self._sent = self._control.hub.changes_since(self._sent), self._control.hub.table
        if changes is None:
            self.stream.send(self._router.table, self.stream, self._sent)
        else:
            self.stream.send(self._router.changes, self.stream, changes)

    def _send_loads(self) -> None:
        if self._go_on():
            loads = tuple(self._control.hub.loads(self._control.now()))
            self.stream.send(self._router.loads, self.stream, loads)
            self._control.agenda.after(LOADS_INTERVAL_S, self._send_loads)

    def _go_on(self) -> bool:
        if self.current and self.stream.open:
            return True
        if self._control.life == self._life and self._wake in self._control.hub._router_wakes:
            self._control.hub.unsubscribe_router(self._wake)
            if self.current:
                self.end_of_stream()
        return False

    def end_of_stream(self) -> None:
        """The stream broke: until it comes back, the router is one that was last heard then."""
        self._control.live.router_gone(self._router.router_id, self.connection)
        self._control.kick("router")
