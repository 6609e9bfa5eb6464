"""`python -m router`: HTTP and gRPC fronts, the watch on the control plane, and an orderly end."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from router import processes
from router.cluster_status import ClusterStatus
from router.config import RouterConfig
from router.core.board import ONE_PROCESS, Board
from router.core.kept import Budget
from router.grpc_port import GrpcPort
from router.http_front import HttpFront
from router.last_table import LastTable
from router.tokens import Guarded
from router.upstream import Continuing, Dispatcher
from router.watch import Watch
from springtide import __version__, notify, telemetry
from springtide.config import load
from springtide.dataplane import Limits, RelayServer
from springtide.discovery import write_discovery
from springtide.errors import FailedPrecondition, InvalidArgument, SpringtideError
from springtide.garbage import keep_what_is_here
from springtide.rpc import Security, parse_address
from springtide.rpc.fronted import authorizer, tls_context

log = logging.getLogger("router")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 after SIGTERM or SIGINT, 2 when it cannot start."""
    arguments = vars(_parser().parse_args(argv))
    try:
        config = load(RouterConfig, arguments.pop("config"), arguments)
        telemetry.setup("springtide-router", level=config.log_level)
        data_dir = Path(config.data_dir)
        data_dir.mkdir(parents=True, exist_ok=True)
        place = processes.place()
        if config.workers > 1 and place is None:
            uvloop.run(run_several(config, data_dir, sys.argv[1:] if argv is None else argv))
        else:
            uvloop.run(run(config, data_dir, place))
    except (SpringtideError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="router", description="Routes tokens to the ACTIVE workers of each pool.")
    parser.add_argument("--config", metavar="FILE.toml", help="configuration file; flags override it")
    parser.add_argument("--controlplane", metavar="HOST:PORT")
    parser.add_argument("--listen", metavar="HOST:PORT", help="gRPC")
    parser.add_argument("--http-listen", metavar="HOST:PORT", dest="http_listen", help="OpenAI HTTP")
    parser.add_argument("--data-dir", dest="data_dir")
    parser.add_argument("--router-id", dest="router_id")
    parser.add_argument("--metrics-port", dest="metrics_port", type=int)
    parser.add_argument("--log-level", dest="log_level")
    parser.add_argument("--drain-timeout-s", dest="drain_timeout_s", type=float)
    parser.add_argument("--workers", type=int, metavar="N", help="processes that share the ports and one view of load")
    return parser


async def run_several(config: RouterConfig, data_dir: Path, arguments: Sequence[str]) -> None:
    """Watches over the processes of `workers` until SIGTERM or SIGINT. Raises SpringtideError."""
    parse_address(config.controlplane, "controlplane")
    router_id = config.router_id or _kept_id(data_dir)
    await processes.Processes(config, data_dir, router_id, arguments).serve(_stop_on_signals())


async def run(config: RouterConfig, data_dir: Path, place: processes.Place | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Raises SpringtideError when it cannot start."""
    parse_address(config.controlplane, "controlplane")
    stop = _stop_on_signals()
    board: Board = ONE_PROCESS
    if place is not None:
        config, board = place.configured(config), place.shared_board()
        place.watch_parent(stop)
    continuing = Continuing(config.continue_streams, config.max_continuations, Budget(config.continuation_max_bytes))
    dispatcher = Dispatcher(config.timeouts, config.max_attempts, board, continuing=continuing, link=config.link)
    discovery = data_dir / (place.discovery if place is not None else "router.json")
    async with contextlib.AsyncExitStack() as stack:
        await _serve(config, data_dir, discovery, dispatcher, stop, stack)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _serve(
    config: RouterConfig,
    data_dir: Path,
    discovery: Path,
    dispatcher: Dispatcher,
    stop: asyncio.Event,
    stack: contextlib.AsyncExitStack,
) -> None:
    limits = Limits(max_body_bytes=config.max_body_bytes, max_connections=config.max_connections)
    security = config.security
    files = Security(
        tls_cert=security.tls_cert,
        tls_key=security.tls_key,
        tls_client_ca=security.tls_client_ca,
        token_file=security.token_file,
        insecure=security.insecure,
    )
    shares = discovery.name != "router.json"
    port = GrpcPort(dispatcher, limits, files, config.generate_front, reuse_port=shares)
    stack.callback(port.close)
    grpc_at = port.listen(config.listen, setting="listen")

    # Of several processes one writes, and all read.
    last = LastTable(data_dir / "router.table", writes=discovery.name in ("router.json", "router.0.json"))

    async def on_table() -> None:
        await port.server.set_all_serving(True)
        table = dispatcher.admission.fleet.table
        last.changed(table)
        notify.status(f"{len(table.workers)} workers in {len(table.pools)} pools, revision {table.revision}")

    router_id = config.router_id or _kept_id(data_dir)
    watch = Watch(dispatcher, config.controlplane, router_id, uuid.uuid4().hex, __version__, on_table)
    front = HttpFront(dispatcher, lambda: watch.connected, ClusterStatus(config.controlplane))
    relay = RelayServer(Guarded(front, authorizer(files)) if files.token_file else front, limits)
    dispatcher.use(relay.pool)
    if (table := last.load()) is not None:
        log.warning("routes by the table of its last life until the control plane answers: revision %d", table.revision)
        dispatcher.snapshot(table)
    http_at = await _listen_http(relay, config, files, shares)
    metrics = telemetry.prometheus_server(
        config.metrics_host, config.metrics_port, dispatcher.metrics.registry, insecure=config.security.insecure
    )
    if metrics is not None:
        stack.callback(metrics.close)
    await port.start()
    if table is not None:
        await port.server.set_all_serving(True)
    addresses = {"grpc": grpc_at, "http": http_at, **({"metrics": metrics.address} if metrics else {})}
    write_discovery(discovery, {"pid": os.getpid(), "router_id": router_id, **addresses})
    log.info("router serves", extra={"router_id": router_id, **addresses})
    async with _background(last.run()), _background(watch.run()), _background(notify.feed_watchdog()):
        keep_what_is_here()
        notify.ready("waiting for the routing table" if table is None else "routes by the last table")
        await stop.wait()
        log.info("router stops")
        notify.stopping("draining")
        front.stopping = True
        notify.extend_timeout(config.drain_timeout_s + 5)
        async with asyncio.TaskGroup() as ending:
            ending.create_task(port.stop(config.drain_timeout_s))
            ending.create_task(relay.close(config.drain_timeout_s))
        dispatcher.close()


@contextlib.asynccontextmanager
async def _background(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _listen_http(relay: RelayServer, config: RouterConfig, security: Security, reuse_port: bool) -> str:
    address = parse_address(config.http_listen, "http_listen")
    if not (address.is_loopback or (security.has_tls and security.authenticates) or security.insecure):
        raise InvalidArgument(
            field="http_listen",
            value=config.http_listen,
            problem="is reachable from other machines, which needs TLS and tokens",
            remedy="Set security.tls_cert, tls_key and token_file (or tls_client_ca), or listen on 127.0.0.1.",
            reason="INSECURE_LISTENER",
        )
    tls = tls_context(security, "http/1.1")
    try:
        port = await relay.start(address.host, address.port, reuse_port=reuse_port, tls=tls)
    except OSError as error:
        raise FailedPrecondition(
            f"http_listen = {config.http_listen}: {error.strerror or error}.",
            reason="PORT_IN_USE",
            field="http_listen",
            value=config.http_listen,
            remedy=f"Stop what listens there (ss -ltnp 'sport = :{address.port}'), or set http_listen to a free port.",
        ) from None
    return f"{str(address).rpartition(':')[0]}:{port}"


def _kept_id(data_dir: Path) -> str:
    path = data_dir / "router.id"
    try:
        return path.read_text().strip() or _new_id(path)
    except FileNotFoundError:
        return _new_id(path)


def _new_id(path: Path) -> str:
    router_id = f"router-{uuid.uuid4().hex[:8]}"
    try:
        path.write_text(router_id + "\n")
    except OSError as error:  # e.g. a full disk: a name for this life only
        log.error("%s cannot be written, so this router has another name next time: %s", path, error)
    return router_id


if __name__ == "__main__":
    sys.exit(main())
