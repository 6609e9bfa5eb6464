"""Start, serve, drain, leave: `python -m nodeagent.engines.sim --port N | --uds PATH --served-model-name X ...`."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from nodeagent.engines.sim.app import App
from nodeagent.engines.sim.engine import SimEngine
from nodeagent.engines.sim.options import SimOptions, parse_options
from nodeagent.engines.sim.protocol import Connection
from springtide.garbage import keep_what_is_here


async def serve(options: SimOptions) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    loop = asyncio.get_running_loop()
    engine = SimEngine(options, loop)
    stop = asyncio.Event()

    def on_signal() -> None:
        if engine.ignore_sigterm:
            print("sim: SIGTERM ignored", file=sys.stderr, flush=True)
        else:
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    startup_s = options.startup_s
    for fault in options.faults:
        if fault.kind == "slow_start":
            startup_s += fault.number("seconds")
        elif fault.kind != "fail_start":
            engine.inject(fault)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), startup_s)
        return 0
    for fault in options.faults:
        if fault.kind == "fail_start":
            print("sim: injected failure at start", file=sys.stderr, flush=True)
            return fault.whole("exit_code")
    engine.occupy()
    connections: set[Connection] = set()
    app = App(engine)
    try:
        if engine.kv is not None:
            await engine.kv.start()
        server = await _listen(options, lambda: Connection(app, connections))
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        print(f"sim: cannot listen on {where}: {error}", file=sys.stderr, flush=True)
        return 2
    keep_what_is_here()
    await stop.wait()
    engine.draining = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.idle(), options.shutdown_timeout_s)
    server.close()
    if engine.kv is not None:
        engine.kv.close()
    for connection in list(connections):
        connection.close()
    for _ in range(100):
        if not connections:
            break
        await asyncio.sleep(0.01)
    _remove_socket(options)
    return 0


async def _listen(options: SimOptions, factory: Callable[[], Connection]) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if options.uds is not None:
        _remove_socket(options)
        server = await loop.create_unix_server(factory, options.uds, backlog=1024)
        where, port = options.uds, 0
    else:
        server = await loop.create_server(factory, options.host, options.port, backlog=1024)
        port = int(server.sockets[0].getsockname()[1])
        where = f"{options.host}:{port}"
    if options.port_file is not None:
        _write_port(Path(options.port_file), port)
    print(f"sim: listening on {where}", file=sys.stderr, flush=True)
    return server


def _write_port(path: Path, port: int) -> None:
    # renamed into place, so that a reader sees all of it or none
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)


def _remove_socket(options: SimOptions) -> None:
    if options.uds is not None:
        Path(options.uds).unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    return uvloop.run(serve(options))


if __name__ == "__main__":
    sys.exit(main())
