"""The agent from start to exit: adopt, serve a session, and leave in one of two ways."""

import asyncio
import logging
import os
import random
import secrets
import signal
import time
from pathlib import Path

import springtide
from nodeagent import gpus
from nodeagent.config import AgentConfig, node_id
from nodeagent.engines.registry import engine_adapter
from nodeagent.engines.rules import LaunchRules
from nodeagent.ledger import Ledger
from nodeagent.metrics import AgentMetrics
from nodeagent.node import Node
from nodeagent.notices import notice_end
from nodeagent.runtime import DISCOVERY_FILE, marker_of, remove_discovery, runtime_dir
from nodeagent.session import AgentSession, AgentSpeaker
from nodeagent.setup import NodeSetup
from nodeagent.start_slots import StartSlots
from springtide import notify, processes
from springtide.clock import SystemClock
from springtide.data_dir import lock_data_dir
from springtide.discovery import write_discovery
from springtide.model.node import NodeObserved
from springtide.session import Session
from springtide.telemetry import prometheus_server
from springtide.wire.agent import Hello

log = logging.getLogger(__name__)

_KILL_AFTER_S = 10.0
_UNTOLD_AFTER_S = 2.0
_NOTICE_POLL_S = 0.5
_ONE_SIGNAL_S = 2.0
"""Batch systems and wrappers give one signal twice: to every process, and to a script that passes it on."""


class Agent:
    """Made before the event loop runs, so that what is wrong with the configuration shows at once.

    Raises SpringtideError, OSError.
    """

    def __init__(self, loaded: AgentConfig) -> None:
        self._config = loaded
        self._data_dir = Path(loaded.data_dir).resolve()
        self._lock = lock_data_dir(self._data_dir, "nodeagent.lock", "agent")
        self._clock = SystemClock()
        self._inventory = gpus.discover(loaded.gpus)
        marker = marker_of(self._data_dir)
        rules = loaded.launch
        interpreters = tuple(rules.interpreters.values())
        self._setup = NodeSetup(
            node_id=node_id(loaded, self._data_dir),
            marker=marker,
            runtime_dir=runtime_dir(loaded.runtime_dir, marker),
            ledger=Ledger(self._data_dir / "workers"),
            gpus=self._inventory.gpus,
            memory=self._inventory,
            adapter=engine_adapter,
            clock=self._clock,
            start_slots=StartSlots(loaded.parallel_starts, loaded.start_slot_s),
            metrics=AgentMetrics(),
            rules=LaunchRules(
                allowed_interpreters=(*rules.allowed_interpreters, *interpreters),
                allowed_flags=rules.allowed_flags,
                denied_flags=rules.denied_flags,
                allowed_env=rules.allowed_env,
            ),
            interpreters=rules.interpreters,
            host=loaded.host,
            advertised_host=loaded.routed_host,
            port_first=loaded.port_first,
            port_last=loaded.port_last,
            probe_interval_s=loaded.probe_interval_s,
            stall_timeout_s=loaded.stall_timeout_s,
        )
        self._node = Node(self._setup)
        self._signals = 0
        self._last_signal: tuple[signal.Signals | None, float] = (None, 0.0)
        self._leave = asyncio.Event()
        self._drain = asyncio.Event()
        self._stop_deadline: float | None = None
        self._stop_reason = ""

    async def run(self) -> None:
        """Returns when the process may exit with 0."""
        loaded = self._config
        self._install_signals()
        registry = self._setup.metrics.registry
        server = prometheus_server(loaded.metrics_host, loaded.metrics_port, registry, insecure=loaded.insecure)
        speaker = AgentSpeaker(
            self._node,
            self._hello(),
            self._setup.metrics,
            stopping=self._seconds_left,
            stop_reason=lambda: self._stop_reason,
        )
        session = Session(
            speaker,
            loaded.controlplane,
            interval_s=loaded.heartbeat_interval_s,
            reconnect_max_s=loaded.reconnect_max_s,
            rng=random.Random(),
        )
        await self._node.adopt()
        self._write_discovery(server.address if server else "")
        serving = asyncio.create_task(session.run())
        watchdog = asyncio.create_task(notify.feed_watchdog())
        notices = asyncio.create_task(self._watch_notice_file())
        notify.ready(f"node {self._setup.node_id}")
        log.info("agent of node %s is up", self._setup.node_id, extra={"node": self._setup.node_id})
        try:
            await self._until_told(serving)
            notify.stopping()
            if self._drain.is_set():
                await self._drain_all(session)
        finally:
            serving.cancel()
            watchdog.cancel()
            notices.cancel()
            await asyncio.gather(serving, watchdog, notices, return_exceptions=True)
            await self._node.close()
            remove_discovery(self._data_dir)
            if server:
                server.close()

    async def _until_told(self, serving: "asyncio.Task[None]") -> None:
        told = [asyncio.create_task(self._leave.wait()), asyncio.create_task(self._drain.wait())]
        await asyncio.wait([serving, *told], return_when=asyncio.FIRST_COMPLETED)
        for task in told:
            task.cancel()
        if serving.done():
            serving.result()  # the session never ends by itself: this raises what went wrong

    # ------------------------------------------------------------ the end

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, self._config.stop_action == "drain")
        loop.add_signal_handler(signal.Signals[self._config.notice_signal], self._on_notice_signal)

    def _on_signal(self, number: signal.Signals, drain: bool) -> None:
        now, before = self._clock.now(), self._last_signal
        self._last_signal = (number, now)
        if before[0] is number and now - before[1] < _ONE_SIGNAL_S:
            return
        self._signals += 1
        if drain and self._signals == 1:
            log.info("draining all workers; a second signal leaves them as they are")
            self._begin_stop(now + self._config.stop_timeout_s, "STOPPED")
        else:
            self._leave.set()

    def _on_notice_signal(self) -> None:
        """Batch systems give it more than once; what comes after it, the stop itself, may shorten the time."""
        if self._stop_deadline is None:
            log.warning("%s: this node is taken away; draining all workers", self._config.notice_signal)
            self._begin_stop(self._clock.now() + self._notice_s, "PRE_SIGNAL")

    @property
    def _notice_s(self) -> float:
        return self._config.notice_s or self._config.stop_timeout_s

    async def _watch_notice_file(self) -> None:
        path = Path(self._config.notice_file)
        while self._config.notice_file:
            end = await asyncio.to_thread(notice_end, path, self._notice_s)
            if end is not None and end > time.time():
                log.warning("%s is there: this node is taken away; draining all workers", path)
                self._begin_stop(self._clock.now() + end - time.time(), "NOTICE_FILE")
                return
            await asyncio.sleep(_NOTICE_POLL_S)

    def _begin_stop(self, deadline: float, reason: str) -> None:
        """The earliest deadline of all that were told stands."""
        self._stop_deadline = deadline if self._stop_deadline is None else min(deadline, self._stop_deadline)
        self._stop_reason = self._stop_reason or reason
        self._drain.set()
        self._setup.changed()

    def _seconds_left(self) -> float | None:
        if self._stop_deadline is None:
            return None
        return max(0.1, self._stop_deadline - self._clock.now())

    async def _drain_all(self, session: AgentSession) -> None:
        """The workers' control plane drains this node; without it, or when it takes too long, the agent does it."""
        notify.extend_timeout((self._seconds_left() or 0.0) + 2 * _KILL_AFTER_S)
        self._setup.changed()
        untold_since = self._clock.now()
        drained_by_us = False
        while not self._over() and self._clock.now() < (self._stop_deadline or 0.0):
            if session.connected and self._node.serves(session.store_id):
                untold_since = self._clock.now()
            elif not drained_by_us and self._clock.now() - untold_since > _UNTOLD_AFTER_S:
                log.warning("no control plane of these workers answers: the agent drains them itself")
                self._node.drain_all()
                drained_by_us = True
            if drained_by_us:
                await self._node.refresh()
                if self._node.drained:
                    break
            await self._pause(0.1)
        if not self._over():
            await self._stop_all()
        if self._node.live_workers == 0:
            await session.goodbye("stopped")  # never while an engine lives: its slice would count as free

    async def _stop_all(self) -> None:
        """Stops every worker, after a while without grace. A further signal leaves them as they are by then."""
        self._node.stop_all()
        grace = self._clock.now() + _KILL_AFTER_S
        while not self._over() and self._clock.now() < grace:
            await self._pause(0.05)
        if not self._over():
            self._node.stop_all(kill=True)
        while not self._over():
            await self._pause(0.05)

    def _over(self) -> bool:
        return self._leave.is_set() or self._node.live_workers == 0

    async def _pause(self, seconds: float) -> None:
        waiting = [asyncio.create_task(self._leave.wait()), asyncio.create_task(self._node.idle.wait())]
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    # ------------------------------------------------------------ small parts

    def _hello(self) -> Hello:
        loaded = self._config
        resources = {"cpus": os.cpu_count() or 1, **loaded.resources}
        return Hello(
            node_id=self._setup.node_id,
            session_id=secrets.token_hex(8),
            observed=NodeObserved(
                boot_id=processes.boot_id(),
                address=loaded.routed_host,
                gpus=self._inventory.gpus,
                labels=loaded.labels,
                resources=resources,
                agent_version=springtide.__version__,
            ),
        )

    def _write_discovery(self, metrics: str) -> None:
        fields: dict[str, object] = {
            "pid": os.getpid(),
            "node_id": self._setup.node_id,
            "runtime_dir": str(self._setup.runtime_dir),
            "marker": self._setup.marker,
        }
        if metrics:
            fields["metrics"] = metrics
        write_discovery(self._data_dir / DISCOVERY_FILE, fields)
