"""How an engine or its shim ended, as people and records are told it."""

import signal
from pathlib import Path

from nodeagent.logtail import log_tail
from springtide import processes
from springtide.model.worker import ExitInfo
from springtide.processes import ProcessIdentity
from springtide.v1 import shim_pb2


def engine_death(status: shim_pb2.ShimStatus | None, stopping: bool) -> ExitInfo:
    """By the shim's last status; None: there never was one. `stopping`: the agent had asked for the end."""
    if status is None:
        return ExitInfo(reason="START_CANCELLED", message="the start was cancelled before anything ran")
    if stopping or status.stop_requested:
        return ExitInfo(reason="STOPPED", message="the engine was stopped as asked")
    if status.HasField("exit_signal"):
        message = f"the engine was killed by {_signal_name(status.exit_signal)}"
        return ExitInfo(signal=status.exit_signal, reason="ENGINE_KILLED", message=message)
    code = status.exit_code if status.HasField("exit_code") else None
    return ExitInfo(code=code, reason="ENGINE_EXITED", message=f"the engine exited with code {code}")


def shim_death(identity: ProcessIdentity | None, ports_exhausted: bool, shim_log: Path) -> ExitInfo:
    """A shim that is gone, by who it was and how it left."""
    if identity is not None and identity.boot_id != processes.boot_id():
        return ExitInfo(reason="HOST_REBOOTED", message="the host was started again")
    if ports_exhausted:
        return ExitInfo(reason="PORTS_EXHAUSTED", message=log_tail(shim_log, lines=1).strip())
    return ExitInfo(reason="SHIM_DIED", message="the shim ended, and its engine with it")


def _signal_name(number: int) -> str:
    """Real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
