"""What a shim is in: admission, engine process, counts, and who waits for a change of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from springtide.link.counts import Seen
from springtide.v1 import shim_pb2

STARTING = shim_pb2.SHIM_ADMISSION_STARTING
OPEN = shim_pb2.SHIM_ADMISSION_OPEN
PAUSED = shim_pb2.SHIM_ADMISSION_PAUSED
DRAINING = shim_pb2.SHIM_ADMISSION_DRAINING
RUNNING = shim_pb2.ENGINE_PROCESS_RUNNING
STOPPING = shim_pb2.ENGINE_PROCESS_STOPPING
ENDED = shim_pb2.ENGINE_PROCESS_ENDED


@dataclass(slots=True)
class ShimState:
    """The facts of one shim. `version` grows with each change but in-flight, and when a closed shim is empty."""

    launch: shim_pb2.ShimLaunch
    now: Callable[[], float]
    generation: int
    max_in_flight: int
    admission: "shim_pb2.ShimAdmission.ValueType" = STARTING
    process: "shim_pb2.EngineProcess.ValueType" = RUNNING
    version: int = 1
    port: int = 0
    shim_pid: int = 0
    guard_pid: int = 0
    confinement: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    stop_requested: bool = False
    in_flight: int = 0
    total_served: int = 0
    refused_total: int = 0
    aborted_total: int = 0
    client_gone_total: int = 0
    idle_since: float = 0.0
    relayed_bytes: int = 0  # of answers that have ended
    running: Callable[[], tuple[int, int]] = lambda: (0, 0)  # event streams that have begun, bytes of their answers
    links: Callable[[], Seen] = Seen
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        """Counts a change and wakes whoever waits for one."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_above(self, version: int, wait_s: float) -> None:
        """Until the version is above `version` or `wait_s` seconds have passed."""
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= version:
                    await self._changed.wait()
        except TimeoutError:
            pass

    def enter(self) -> None:
        """One request more."""
        self.in_flight += 1

    def leave(self) -> None:
        """One request less."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle_since = self.now()
            if self.admission != OPEN:
                self.changed()  # a drain waits for this

    def status(self) -> shim_pb2.ShimStatus:
        """The facts as a message."""
        streams, relayed_bytes = self.running()
        status = shim_pb2.ShimStatus(
            version=self.version,
            worker_id=self.launch.worker_id,
            incarnation=self.launch.incarnation,
            generation=self.generation,
            admission=self.admission,
            process=self.process,
            in_flight=self.in_flight,
            total_served=self.total_served,
            max_in_flight=self.max_in_flight,
            port=self.port,
            shim_pid=self.shim_pid,
            guard_pid=self.guard_pid,
            confinement=self.confinement,
            stop_requested=self.stop_requested,
            refused_total=self.refused_total,
            aborted_total=self.aborted_total,
            client_gone_total=self.client_gone_total,
            engine_endpoint=self.launch.engine_endpoint,
            idle_s=0.0 if self.in_flight else self.now() - self.idle_since,
            streams=streams,
            relayed_bytes=self.relayed_bytes + relayed_bytes,
            links=link_counts(self.links()),
        )
        if self.exit_code is not None:
            status.exit_code = self.exit_code
        if self.exit_signal is not None:
            status.exit_signal = self.exit_signal
        return status


def link_counts(seen: Seen) -> shim_pb2.LinkCounts:
    """What the links have carried, as a message."""
    carried = seen.carried
    return shim_pb2.LinkCounts(
        links=seen.links,
        streams=seen.streams,
        frames_in=carried.frames_in,
        bytes_in=carried.bytes_in,
        frames_out=carried.frames_out,
        bytes_out=carried.bytes_out,
        streams_opened=carried.opened,
        streams_refused=carried.refused,
        ended=seen.ended,
    )
