"""A shim's life: listen, start the engine, serve, and leave once the engine has ended and nobody asks any more."""

import asyncio
import errno
import logging
import os
import signal
import socket
from pathlib import Path

from google.protobuf import json_format

from nodeagent.shim.control import Control
from nodeagent.shim.engine_process import EngineProcess
from nodeagent.shim.front import Front
from nodeagent.shim.state import ENDED, STOPPING, ShimState
from springtide.dataplane.messages import Limits
from springtide.dataplane.server import RelayServer
from springtide.garbage import keep_what_is_here
from springtide.link import LinkServer
from springtide.log_file import MAX_LOG_BYTES, bound_log
from springtide.v1 import shim_pb2

log = logging.getLogger(__name__)

FORGOTTEN_AFTER_S = 600.0
"""A shim whose engine has ended leaves by itself when no agent asked it anything for this long."""
_CHECK_INTERVAL_S = 5.0


class NoPort(Exception):
    """No port of the range is free."""


def bind_data_port(host: str, first: int, last: int) -> socket.socket:
    """A listening socket on the first free port of `first..last` (0: any). Raises NoPort, OSError for a bad host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, max(first, last) + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(1024)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            sock.setblocking(False)
            return sock
    raise NoPort(f"every port of {first}-{last} on {host} is in use; widen the agent's port range")


class Shim:
    """One shim from start to exit."""

    def __init__(self, launch: shim_pb2.ShimLaunch, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self._launch = launch
        self._leaving = asyncio.Event()
        self._signals = 0
        self.state = ShimState(
            launch=launch,
            now=loop.time,
            generation=launch.generation,
            max_in_flight=launch.max_in_flight,
            shim_pid=os.getpid(),
            idle_since=loop.time(),
        )
        self._engine = EngineProcess(launch, folder, self._engine_ended, self._engine_started)
        self._data = RelayServer(Front(self.state))
        links = LinkServer(self._data)
        self._data.upgrades = links.upgrade
        self.state.running = self._running
        self.state.links = links.counts.seen
        self._control = Control(self.state, self._stop, self._abort, self._leaving.set)
        limits = Limits(max_connections=64, max_body_bytes=64 * 1024)
        self._control_server = RelayServer(self._control, limits)

    async def run(self) -> None:
        """Returns when the shim may exit: no process of its engine is left. Raises NoPort, OSError."""
        sock = bind_data_port(self._launch.listen_host or "127.0.0.1", self._launch.port_first, self._launch.port_last)
        self.state.port = await self._data.start(sock=sock)
        control = Path(self._launch.control_path)
        control.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call
        old_mask = os.umask(0o177)
        try:
            await self._control_server.start(path=control)
        finally:
            os.umask(old_mask)
        self._engine.start()
        self.state.guard_pid = self._engine.guard_pid
        self._install_signals()
        self._write_runtime_file()
        keep_what_is_here()
        try:
            while not self._leaving.is_set():
                try:
                    async with asyncio.timeout(_CHECK_INTERVAL_S):
                        await self._leaving.wait()
                except TimeoutError:
                    await self._check()
            await asyncio.sleep(0)  # lets the answer to /v1/quit go out
        finally:
            await self._data.close()
            await self._control_server.close(drain_s=0.2)
            control.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call

    def _running(self) -> tuple[int, int]:
        """Event streams that have begun, and the bytes that went out of them."""
        begun = [exchange.attempt.sent for exchange in self._data.exchanges if exchange.streaming and exchange.attempt]
        return len(begun), sum(begun)

    def _stop(self, grace_s: float) -> None:
        self.state.stop_requested = True
        if self.state.process != STOPPING:
            self.state.process = STOPPING
            self.state.changed()
        self._engine.stop(grace_s)

    def _abort(self) -> int:
        return self._data.abort("counted", "the worker is drained and its deadline has passed", "worker_drained")

    def _engine_started(self) -> None:
        self.state.confinement = self._engine.confinement
        self.state.changed()

    def _engine_ended(self, code: int | None, number: int | None) -> None:
        log.info("engine ended: code %s, signal %s", code, number)
        state = self.state
        state.exit_code, state.exit_signal, state.process = code, number, ENDED
        state.changed()
        if self._signals:
            self._leaving.set()

    async def _check(self) -> None:
        if self.state.process == ENDED and self.state.now() - self._control.last_contact > FORGOTTEN_AFTER_S:
            log.info("the engine has ended and no agent asked for %.0f s", FORGOTTEN_AFTER_S)
            self._leaving.set()
        try:  # in a thread: tens of MiB are moved while tokens flow
            await asyncio.to_thread(bound_log, Path(self._launch.engine_log_path), MAX_LOG_BYTES)
        except OSError as error:
            log.warning("cannot bound the engine's log: %s", error)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)

    def _on_sigterm(self) -> None:
        self._signals += 1
        if self.state.process == ENDED:
            self._leaving.set()
        else:
            self._stop(self._launch.stop_grace_s if self._signals == 1 else 0.0)

    def _write_runtime_file(self) -> None:
        if not self._launch.runtime_file:
            return
        path = Path(self._launch.runtime_file)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json_format.MessageToJson(self.state.status(), indent=None))
            temporary.replace(path)
        except OSError as error:
            log.warning("cannot write %s: %s; the control socket tells the same", path, error)
