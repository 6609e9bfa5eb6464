"""The control plane's process: `python -m controlplane --config FILE.toml`."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from controlplane.assembly import ControlPlane
from controlplane.config import ControlPlaneConfig, from_command_line
from controlplane.core import views
from controlplane.journal import journal
from controlplane.loops.leader import Step
from controlplane.metrics import Metrics
from controlplane.plugins import load_policies
from controlplane.services.present import status_message
from controlplane.store.memory import MemoryStore
from controlplane.store.sqlite import SqliteStore
from controlplane.store.store import Store
from controlplane.traces import Traces
from springtide import __version__, notify, telemetry
from springtide.client.cluster import cluster_status
from springtide.clock import SystemClock
from springtide.discovery import write_discovery
from springtide.errors import SpringtideError

log = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after SIGTERM or SIGINT, 2 for a start that cannot work, with one line on stderr."""
    try:
        settings = from_command_line(sys.argv[1:] if arguments is None else arguments)
        telemetry.setup("springtide-controlplane", level=settings.log_level)
        load_policies()
        return asyncio.run(run(settings))
    except SpringtideError as error:
        print(f"controlplane: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()


async def run(settings: ControlPlaneConfig) -> int:
    """Serves until a signal comes."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clock = SystemClock()
    traces, metrics = Traces(), Metrics()

    def watch(step: Step) -> None:
        journal(step)
        traces(step)
        metrics(step)

    control = ControlPlane(make_store(settings), settings, clock, watch)
    metrics.attach(control)
    endpoint = telemetry.prometheus_server(
        settings.metrics_host,
        settings.metrics_port,
        metrics.registry,
        insecure=settings.insecure_listen,
        pages={"/cluster_status": partial(cluster_page, control)},
    )
    start = asyncio.create_task(control.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        return 0
    address = start.result()
    discovery = Path(settings.data_dir) / "controlplane.json"
    found = {"pid": os.getpid(), "grpc": address}
    write_discovery(discovery, found if endpoint is None else {**found, "metrics": endpoint.address})
    notify.ready(f"serving on {address}")
    watchdog = asyncio.create_task(notify.feed_watchdog(control.leader.makes_progress))
    leading = asyncio.create_task(control.leading())
    status = asyncio.create_task(tell_status(control))
    await asyncio.wait({stopped, leading}, return_when=asyncio.FIRST_COMPLETED)
    failed = leading.done()  # the leader ends only when it is told to
    notify.stopping()
    for task in (watchdog, status, leading, stopped):
        task.cancel()
    await control.stop()
    discovery.unlink(missing_ok=True)
    if endpoint is not None:
        endpoint.close()
    return 1 if failed else 0


def cluster_page(control: ControlPlane, query: Mapping[str, str]) -> object:
    """`/cluster_status?pool=NAME`. Runs in the endpoint's thread: reads the published, unchanging snapshot only."""
    now = control.clock.now()
    return cluster_status(status_message(control.hub.snapshot, now, __version__), query.get("pool", ""), now)


async def tell_status(control: ControlPlane) -> None:
    """One line for `systemctl status`, when it has changed."""
    told = ""
    while True:
        summary = views.summary(control.hub.snapshot)
        text = (
            f"{len(control.hub.snapshot.pools)} pools, {summary.active_instances} workers active, "
            f"{summary.scaling_up_instances} starting, {summary.active_servers} nodes up"
        )
        error = control.leader.stats.store_error
        text = text if error is None else f"{error} ({text})"
        if text != told:
            notify.status(text)
            told = text
        await asyncio.sleep(_STATUS_INTERVAL_S)


def make_store(settings: ControlPlaneConfig) -> Store:
    """The only place that names stores."""
    if settings.store == "memory":
        return MemoryStore()
    return SqliteStore(Path(settings.data_dir))


if __name__ == "__main__":
    sys.exit(main())
