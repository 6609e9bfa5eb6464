"""`--workers N`: N processes share the router's ports (SO_REUSEPORT) and one view of load; this one watches over them.

The parent holds the ports without listening, starts the processes, starts one again that ends, and shows them as one
router: one discovery file, one metrics endpoint, one answer to systemd. A process ends when its parent does, however.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.merged import Merged
from router.shared import SharedBoard, make_board
from springtide import notify, telemetry
from springtide.discovery import write_discovery
from springtide.errors import FailedPrecondition, Unavailable
from springtide.rpc import parse_address

log = logging.getLogger(__name__)

PLACE = "SPRINGTIDE_ROUTER_PLACE"
_START_TIMEOUT_S = 60.0
_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_KILL_AFTER_S = 10.0
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which of a router's processes this one is, as its parent told it."""

    index: int
    count: int
    listen: str
    http_listen: str
    router_id: str
    board: str
    parent_fd: int
    """Reads end of file when the parent is gone."""

    @property
    def discovery(self) -> str:
        return f"router.{self.index}.json"

    def configured(self, config: RouterConfig) -> RouterConfig:
        """What is different for one of several."""
        return dataclasses.replace(
            config,
            listen=self.listen,
            http_listen=self.http_listen,
            router_id=f"{self.router_id}-{self.index}",
            metrics_host="127.0.0.1",
            metrics_port=-1 if config.metrics_port < 0 else 0,
            max_connections=math.ceil(config.max_connections / self.count),
        )

    def shared_board(self) -> SharedBoard:
        return SharedBoard(Path(self.board), self.index, self.count)

    def watch_parent(self, stop: asyncio.Event) -> None:
        """Sets `stop` when the parent is gone."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self.parent_fd)
            log.warning("the parent is gone: stops")
            stop.set()

        loop.add_reader(self.parent_fd, gone)


def place() -> Place | None:
    """This process's place; None: it is on its own. The word is taken out of the environment."""
    told = os.environ.pop(PLACE, "")
    return Place(**json.loads(told)) if told else None


@dataclasses.dataclass(slots=True)
class _Child:
    index: int
    process: asyncio.subprocess.Process | None = None
    metrics: str = ""


class Processes:
    """The parent's side. `serve` until `stop` is set."""

    def __init__(self, config: RouterConfig, data_dir: Path, router_id: str, arguments: Sequence[str]) -> None:
        self._config = config
        self._data_dir = data_dir
        self._router_id = router_id
        self._arguments = arguments
        self._children = [_Child(index) for index in range(config.workers)]
        self._stopping = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Raises SpringtideError when a port is taken, and Unavailable when a process cannot start."""
        with contextlib.ExitStack() as stack:
            self._listen = _hold_port(self._config.listen, "listen", stack)
            self._http_listen = _hold_port(self._config.http_listen, "http_listen", stack)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-router-"))
            self._board = Path(folder) / "board"
            make_board(self._board, len(self._children))
            self._parent_fd, held = os.pipe()
            stack.callback(os.close, self._parent_fd)
            stack.callback(os.close, held)
            try:
                await self._serve(stop, stack)
            finally:
                self._stopping = True
                await self._end()

    async def _serve(self, stop: asyncio.Event, stack: contextlib.ExitStack) -> None:
        for child in self._children:
            await self._start(child)
        await self._started(stop)
        if stop.is_set():
            return
        config = self._config
        registry = CollectorRegistry()
        registry.register(Merged(lambda: [child.metrics for child in self._children if child.metrics]))
        metrics = telemetry.prometheus_server(
            config.metrics_host, config.metrics_port, registry, insecure=config.security.insecure
        )
        if metrics is not None:
            stack.callback(metrics.close)
        addresses = {"grpc": self._listen, "http": self._http_listen}
        if metrics is not None:
            addresses["metrics"] = metrics.address
        self._write_discovery(addresses)
        log.info("router serves", extra={"router_id": self._router_id, **addresses})
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(self._keep(child, addresses)) for child in self._children]
            watching.append(group.create_task(notify.feed_watchdog()))
            notify.ready(f"{len(self._children)} processes")
            await stop.wait()
            log.info("router stops")
            self._stopping = True
            notify.stopping("draining")
            notify.extend_timeout(config.drain_timeout_s + _KILL_AFTER_S)
            for task in watching:
                task.cancel()

    # ------------------------------------------------------------ one process

    async def _start(self, child: _Child) -> None:
        self._file(child).unlink(missing_ok=True)
        child.metrics = ""
        told = Place(
            index=child.index,
            count=len(self._children),
            listen=self._listen,
            http_listen=self._http_listen,
            router_id=self._router_id,
            board=str(self._board),
            parent_fd=self._parent_fd,
        )
        environment = {key: value for key, value in os.environ.items() if key not in _OF_THE_PARENT}
        environment[PLACE] = json.dumps(dataclasses.asdict(told))
        child.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *self._arguments, env=environment, pass_fds=(self._parent_fd,)
        )

    async def _started(self, stop: asyncio.Event) -> None:
        """Until all of them listen."""
        end = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not stop.is_set():
            for child in self._children:
                process = child.process
                if process is not None and process.returncode is not None:
                    raise Unavailable(
                        f"Process {child.index} of {len(self._children)} ended with {process.returncode}.",
                        reason="PROCESS_ENDED",
                        remedy="The line before says why.",
                    )
            if all(self._serves(child) for child in self._children):
                return
            if asyncio.get_running_loop().time() > end:
                raise Unavailable(f"Its processes do not listen after {_START_TIMEOUT_S:g} s.", reason="START_TIMEOUT")
            await asyncio.sleep(_POLL_S)

    def _serves(self, child: _Child) -> bool:
        """Whether it has written where it listens."""
        try:
            found = json.loads(self._file(child).read_text())
        except FileNotFoundError:
            return False
        child.metrics = found.get("metrics", "")
        return True

    async def _keep(self, child: _Child, addresses: dict[str, str]) -> None:
        """Starts it again whenever it ends."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            assert child.process is not None
            started_at = loop.time()
            await child.process.wait()
            if loop.time() - started_at > _LONGEST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            log.error(
                "process %d ended with %s; another one is started in %.1f s",
                child.index,
                child.process.returncode,
                backoff_s,
            )
            child.metrics = ""
            # What it had in flight died with its connections.
            SharedBoard(self._board, child.index, len(self._children)).close()
            await asyncio.sleep(backoff_s)
            backoff_s = min(_LONGEST_BACKOFF_S, backoff_s * 2)
            await self._start(child)
            while child.process.returncode is None and not self._serves(child):
                await asyncio.sleep(_POLL_S)
            self._write_discovery(addresses)

    async def _end(self) -> None:
        """SIGTERM; SIGKILL for what is left after the drain's time."""
        running = [child.process for child in self._children if child.process and child.process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s + _KILL_AFTER_S):
                await asyncio.gather(*(process.wait() for process in running))
        except TimeoutError:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in running))
        for child in self._children:
            self._file(child).unlink(missing_ok=True)

    def _file(self, child: _Child) -> Path:
        return self._data_dir / f"router.{child.index}.json"

    def _write_discovery(self, addresses: dict[str, str]) -> None:
        pids = [child.process.pid for child in self._children if child.process is not None]
        content = {"pid": os.getpid(), "router_id": self._router_id, **addresses, "processes": pids}
        write_discovery(self._data_dir / "router.json", content)


_OF_THE_PARENT = frozenset(("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))


def _hold_port(text: str, setting: str, stack: contextlib.ExitStack) -> str:
    """Binds the address for others to listen on, and gives it with its port. Asks first whether it is really free: with
    SO_REUSEPORT a second router would share it silently."""
    address = parse_address(text, setting)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    port = address.port
    try:
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address.host, port))
        held = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address.host, port))
    except OSError as error:
        raise FailedPrecondition(
            f"{setting} = {text}: {error.strerror or error}.",
            reason="PORT_IN_USE",
            field=setting,
            value=text,
            remedy=f"Stop what listens there (ss -ltnp 'sport = :{port}'), or set {setting} to a free port.",
        ) from None
    return f"{str(address).rpartition(':')[0]}:{held.getsockname()[1]}"
