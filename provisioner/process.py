"""The provisioner from start to exit. Its nodes outlive it: the next process of the same id finds them again."""

import asyncio
import logging
import os
import random
import secrets
import signal
from pathlib import Path

import springtide
from provisioner.config import ProvisionerConfig
from provisioner.context import ProviderContext
from provisioner.metrics import ProvisionerMetrics
from provisioner.registry import load_create
from provisioner.runner import Runner
from provisioner.session import ProvisionerSession, ProvisionerSpeaker
from springtide import notify
from springtide.clock import SystemClock
from springtide.data_dir import lock_data_dir
from springtide.discovery import write_discovery
from springtide.session import Session
from springtide.telemetry import prometheus_server
from springtide.wire.provisioner import ProvisionerHello

log = logging.getLogger(__name__)

DISCOVERY_FILE = "provisioner.json"
_STATUS_INTERVAL_S = 2.0


class Provisioner:
    """Made before the event loop runs, so that what is wrong with the configuration shows at once. Raises
    SpringtideError, OSError."""

    def __init__(self, loaded: ProvisionerConfig) -> None:
        self._config = loaded
        self._data_dir = Path(loaded.data_dir).resolve()
        self._lock = lock_data_dir(self._data_dir, "provisioner.lock", "provisioner")
        self._clock = SystemClock()
        self._metrics = ProvisionerMetrics()
        folder = self._data_dir / "provider"
        folder.mkdir(exist_ok=True, mode=0o700)
        context = ProviderContext(
            provisioner_id=loaded.provisioner_id,
            data_dir=folder,
            agent_controlplane=loaded.agent_controlplane,
            tls_ca=loaded.agent_tls_ca,
            clock=self._clock,
        )
        self._provider = load_create(loaded.kind)(loaded.provider, context)

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT. Nodes stay."""
        loaded = self._config
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        server = prometheus_server(
            loaded.metrics_host, loaded.metrics_port, self._metrics.registry, insecure=loaded.insecure
        )
        runner = Runner(
            self._provider,
            self._clock,
            self._metrics,
            poll_interval_s=loaded.poll_interval_s,
            call_timeout_s=loaded.call_timeout_s,
        )
        hello = ProvisionerHello(loaded.provisioner_id, secrets.token_hex(8), loaded.kind, springtide.__version__)
        session = Session(
            ProvisionerSpeaker(runner, hello, self._metrics),
            loaded.controlplane,
            interval_s=loaded.report_interval_s,
            reconnect_max_s=loaded.reconnect_max_s,
            rng=random.Random(),
        )
        found: dict[str, object] = {"pid": os.getpid(), "provisioner_id": loaded.provisioner_id, "kind": loaded.kind}
        write_discovery(
            self._data_dir / DISCOVERY_FILE, found if server is None else {**found, "metrics": server.address}
        )
        tasks = [
            asyncio.create_task(runner.run()),
            asyncio.create_task(session.run()),
            asyncio.create_task(notify.feed_watchdog()),
            asyncio.create_task(self._tell_status(runner, session)),
        ]
        notify.ready(f"provisioner {loaded.provisioner_id}")
        log.info("provisioner %s of kind %s is up", loaded.provisioner_id, loaded.kind)
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks[:2]], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a loop never ends by itself: this raises what went wrong
            notify.stopping()
            await session.goodbye("stopped; its nodes stay")
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            await runner.close()
            (self._data_dir / DISCOVERY_FILE).unlink(missing_ok=True)
            if server is not None:
                server.close()

    async def _tell_status(self, runner: Runner, session: ProvisionerSession) -> None:
        """One line for `systemctl status`, when it has changed."""
        told = ""
        while True:
            text = f"{len(runner.nodes)} nodes" if runner.ready else "the provider has not answered yet"
            text += "" if session.connected else "; no control plane answers"
            if text != told:
                notify.status(text)
                told = text
            await asyncio.sleep(_STATUS_INTERVAL_S)
