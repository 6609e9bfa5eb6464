"""What the control plane wants of a node's workers. Re-sent as a whole; absence never stops a worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import Want


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """How to start an engine. The agent adds what only the node knows: ports, sockets, visible devices."""

    engine: str = ""
    model: str = ""
    served_model_name: str = ""
    tensor_parallel_size: int = 1
    gpu_ids: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""
    max_in_flight: int = 0  # 0: the engine's running limit
    start_timeout_s: float = 900.0
    stop_grace_s: float = 30.0
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class DesiredWorker:
    """`want` None: the sender knows a word that we do not; leave the worker as it is."""

    worker_id: str
    pool: str
    generation: int
    want: Want | None
    launch: EngineLaunch = EngineLaunch()
    paused: bool = False  # with RUN: the shim refuses with `paused`
    abort_in_flight: bool = False  # with DRAIN: cut what still runs, with an explicit error
    kill: bool = False  # with STOP: no grace
    traceparent: str = ""
    sleep_level: int = 0  # with SLEEP: 1 keeps the weights in the host's memory, 2 drops them
    start_asleep: bool = False  # with SLEEP: where no engine runs, one is started and put to sleep
    weight_version: str = ""  # with RUN: that it shall serve; it changes while it is paused
    weight_source: str = ""
    after_incarnation: int = 0  # with RUN: a new engine's incarnation is greater than this, whatever the clock says
