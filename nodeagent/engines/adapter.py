"""What the agent knows of an engine: how it is started, and how it is asked. Adapters hold no state.

`command` is pure; the probes are coroutines over an `EngineHttp`. A verb that an engine cannot do raises Unimplemented
and names the flag that is missing. Values that an engine does not give are None, never zero.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from nodeagent.engines.http import EngineHttp
from nodeagent.engines.rules import LaunchRules
from springtide.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """One engine to start on this node: what the control plane wants, and what only the node knows.

    gpu_ids: what the visible-devices variable takes (indexes, UUIDs, MIG names), or simulated slots. env: additions by
    the pool. interpreter: None is the agent's own. max_in_flight: None is the engine's running limit. uds_path: where
    the engine listens if it can listen on a unix socket ("" if it shall not); port: a free loopback port otherwise.
    side_channel: host and port that are this worker's alone, for engines that ask for one (`needs_side_channel`).
    cpu_ids: cores that engines without GPUs may bind to.
    """

    engine: str
    model: str
    served_model_name: str
    tensor_parallel_size: int = 1
    gpu_ids: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    interpreter: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_in_flight: int | None = None
    uds_path: str = ""
    port: int = 0
    side_channel: tuple[str, int] | None = None
    log_path: str = ""
    start_timeout_s: float = 900.0
    stop_grace_s: float = 30.0
    simulated_gpus: bool = False
    cpu_ids: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to run. `env` is what is added to the agent's environment; `endpoint` is `unix:PATH` or `127.0.0.1:PORT`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    endpoint: str


class ReadyReason(StrEnum):
    """Why an engine is ready, or not."""

    READY = "READY"
    NOT_LISTENING = "NOT_LISTENING"
    NO_ANSWER = "NO_ANSWER"
    UNHEALTHY = "UNHEALTHY"
    SLEEPING = "SLEEPING"
    PAUSED = "PAUSED"


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of a readiness probe; `detail` is for people."""

    reason: ReadyReason
    detail: str = ""

    @property
    def ready(self) -> bool:
        """The engine would compute a request now."""
        return self.reason is ReadyReason.READY


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of its load; None where it says nothing. kv_use is 0..1; totals count since its start."""

    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    generation_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    max_running: int | None = None

    @property
    def idle(self) -> bool | None:
        """Nothing runs or waits in the engine; None when it does not say."""
        if self.running is None or self.waiting is None:
            return None
        return self.running == 0 and self.waiting == 0


Tags = tuple[str, ...]
"""Parts of an engine's memory: `weights`, `kv_cache`, and what else an engine names."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one running engine can do. `missing`: verb to the flag, variable or device that it lacks.

    A verb that is not in `missing` can be tried; `asked` False: the engine did not answer, nothing is known.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    asked: bool = True

    def can(self, verb: str) -> bool:
        """Nothing is known that forbids it."""
        return verb not in self.missing


class EngineAdapter(Protocol):
    """One kind of engine. Stopping it is its process's end (SIGTERM), which the shim does.

    Probes raise `nodeagent.engines.http.NotListening` or `NoAnswer` where not said otherwise.
    """

    name: str

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The process to start. Pure. Raises InvalidArgument when the launch cannot be expressed."""

    def validate(self, launch: EngineLaunch, rules: LaunchRules) -> list[InvalidArgument]:
        """Everything that forbids this launch on this node; empty when it may run."""

    def needs_side_channel(self, args: Sequence[str]) -> bool:
        """Whether an engine with these arguments listens on a TCP port of its own for engines on other nodes."""

    def default_max_in_flight(self, launch: EngineLaunch) -> int:
        """How many requests the engine runs at once: the shim's bound when the pool sets none."""

    async def ready(self, http: EngineHttp) -> Readiness:
        """Healthy, awake and not paused. Generates nothing, never raises for an engine that is away."""

    async def warm_up(self, http: EngineHttp, model: str, timeout_s: float = 300.0) -> None:
        """Generate one token. Raises WarmUpFailed with the engine's words when that fails."""

    async def load(self, http: EngineHttp) -> EngineLoad:
        """The engine's own numbers."""

    async def idle(self, http: EngineHttp) -> bool | None:
        """The engine itself says that nothing runs or waits; None when it does not say."""

    async def wait_idle(self, http: EngineHttp, timeout_s: float) -> None:
        """Until the engine itself says that nothing runs or waits. FailedPrecondition (ENGINE_BUSY) after the time."""

    async def capabilities(self, http: EngineHttp) -> Capabilities:
        """Which verbs this engine can do, asked of the engine itself; never concluded from its version."""

    async def abort_all(self, http: EngineHttp) -> None:
        """End every request in the engine. Raises Unimplemented."""

    async def abort(self, http: EngineHttp, request_id: str) -> None:
        """End one request by the client's id; one that is not there is no error. Raises Unimplemented."""

    async def pause(self, http: EngineHttp, mode: str) -> None:
        """Stop computing: `abort` what runs, `wait` for it, or `keep` it. Raises Unimplemented."""

    async def resume(self, http: EngineHttp) -> None:
        """Compute again after a pause. Raises Unimplemented."""

    async def flush_cache(self, http: EngineHttp) -> None:
        """Forget cached prefixes. Raises Unimplemented; FailedPrecondition while requests run."""

    async def release(self, http: EngineHttp, level: int = 1, tags: Tags = ()) -> Tags:
        """Give memory back: level 1 keeps weights on the host, 2 drops them; `tags`: only these parts.

        Returns what is released now; remember it, and give exactly that to `restore`. FailedPrecondition unless idle,
        Unimplemented. A second call is harmless only where `released` can be asked.
        """

    async def restore(self, http: EngineHttp, tags: Tags = ()) -> None:
        """Take memory again after `release`: only tags that were released (none: all of them). Raises Unimplemented."""

    async def released(self, http: EngineHttp) -> bool | None:
        """Whether memory is released, in the engine's own words; None when it cannot be asked."""

    def keeps_weights(self, level: int, args: Sequence[str]) -> bool:
        """Whether the weights survive a release of this level; else they must be loaded again before serving."""

    async def weight_version(self, http: EngineHttp) -> str | None:
        """The label of the weights that it serves; None when it has none."""

    async def update_weights(self, http: EngineHttp, version: str, source: str, timeout_s: float = 600.0) -> None:
        """Load weights in place from the folder `source` of its host, and label them. Raises Unimplemented."""

    async def profile(self, http: EngineHttp, start: bool) -> None:
        """Start or stop the engine's profiler. Raises Unimplemented."""
