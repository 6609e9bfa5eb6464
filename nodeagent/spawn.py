"""From a launch to a running shim: the checks, the launch file, the ledger, the process. No step waits."""

import contextlib
import dataclasses
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import json_format

from nodeagent import marks
from nodeagent.core.fingerprint import fingerprint
from nodeagent.engines import adapter as engines
from nodeagent.engines.openai_engine import is_local_model
from nodeagent.ledger import LedgerEntry, write_atomically
from nodeagent.setup import NodeSetup, reserve_loopback_port, reserve_side_channel
from nodeagent.shim.launch import LAUNCH_FILE
from springtide import processes
from springtide.errors import SpringtideError
from springtide.model.desired import EngineLaunch
from springtide.v1 import shim_pb2

_NOT_FOR_ENGINES = ("SPRINGTIDE_", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "OTEL_SERVICE_NAME")
_MAX_SOCKET_PATH = 100


class LedgerWriteFailed(SpringtideError):
    """The ledger cannot be written, so nothing was started."""

    default_reason = "LEDGER_WRITE_FAILED"


def engine_launch(
    setup: NodeSetup,
    launch: EngineLaunch,
    uds_path: str,
    log_path: str,
    port: int,
    side_channel: tuple[str, int] | None = None,
) -> engines.EngineLaunch:
    """The launch with what only the node knows."""
    return engines.EngineLaunch(
        engine=launch.engine,
        # A shim's working folder is not the agent's, so a path must not depend on it.
        model=str(Path(launch.model).expanduser().absolute()) if is_local_model(launch.model) else launch.model,
        served_model_name=launch.served_model_name,
        tensor_parallel_size=launch.tensor_parallel_size,
        gpu_ids=launch.gpu_ids,
        engine_args=launch.engine_args,
        interpreter=launch.interpreter or setup.interpreters.get(launch.engine) or None,
        env=launch.engine_env,
        max_in_flight=launch.max_in_flight or None,
        uds_path=uds_path,
        port=port,
        side_channel=side_channel,
        log_path=log_path,
        start_timeout_s=launch.start_timeout_s,
        stop_grace_s=launch.stop_grace_s,
        simulated_gpus=setup.simulated,
    )


def spawn(setup: NodeSetup, entry: LedgerEntry) -> LedgerEntry:
    """Starts a shim for `entry.launch` and returns the entry with what is known of it now.

    Raises InvalidArgument for a launch that this node refuses, Exhausted when a port is missing, LedgerWriteFailed,
    OSError. Then nothing runs.
    """
    with contextlib.ExitStack() as held:  # the shim inherits ports, and holds them as long as it lives
        port = held.enter_context(reserve_loopback_port())
        side_channel = None
        if setup.adapter(entry.launch.engine).needs_side_channel(entry.launch.engine_args):
            side_channel = held.enter_context(reserve_side_channel(setup))
        return _spawn(setup, entry, port, side_channel)


def _spawn(
    setup: NodeSetup, entry: LedgerEntry, loopback: socket.socket, side_channel: socket.socket | None
) -> LedgerEntry:
    folder = setup.ledger.folder(entry.worker_id)
    socket_name = _socket_name(setup.runtime_dir, entry.worker_id)
    control, engine_socket = Path(f"{socket_name}.ctl"), Path(f"{socket_name}.eng")
    log_path = folder / "engine.log"
    port = int(loopback.getsockname()[1])
    meeting_point = None if side_channel is None else side_channel.getsockname()[:2]
    launch = engine_launch(setup, entry.launch, str(engine_socket), str(log_path), port, meeting_point)
    adapter = setup.adapter(launch.engine)
    for problem in adapter.validate(launch, setup.rules):
        raise problem
    command = adapter.command(launch)
    entry = dataclasses.replace(
        entry,
        live=True,
        started_generation=entry.generation,
        incarnation=max(entry.incarnation + 1, int(setup.clock.now() * 1000)),
        gpu_ids=entry.launch.gpu_ids,
        control_path=str(control),
        engine_endpoint=command.endpoint,
        max_in_flight=entry.launch.max_in_flight or adapter.default_max_in_flight(launch),
        fingerprint=fingerprint(entry.launch),
        memory_before=_memory_in_use(setup, entry.launch.gpu_ids),
        shim=None,
        exit=None,
        start_phases={},
        stopped=False,
    )
    env = _environment(setup, entry)
    message = shim_pb2.ShimLaunch(
        worker_id=entry.worker_id,
        incarnation=entry.incarnation,
        generation=entry.generation,
        argv=command.argv,
        env={**_without_python(env), **command.env},
        engine_endpoint=command.endpoint,
        listen_host=setup.host,
        port_first=setup.port_first,
        port_last=setup.port_last,
        control_path=str(control),
        max_in_flight=entry.max_in_flight,
        stop_grace_s=entry.launch.stop_grace_s,
        engine_log_path=str(log_path),
        marker=setup.marker,
        runtime_file=str(folder / "shim.json"),
    )
    try:
        setup.ledger.write(entry)
        write_atomically(folder / LAUNCH_FILE, json_format.MessageToJson(message).encode())
        for stale in (control, engine_socket, folder / "shim.json"):
            stale.unlink(missing_ok=True)
        shim_log = _open_log(folder / "shim.log")
    except OSError as error:
        raise LedgerWriteFailed(
            f"cannot write the ledger of worker {entry.worker_id}: {error}.", remedy=f"Make room in {folder}."
        ) from None
    kept = [] if command.endpoint.startswith("unix:") else [loopback]
    kept += [] if side_channel is None else [side_channel]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent.shim", "--dir", str(folder)],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=shim_log,
            stderr=shim_log,
            start_new_session=True,
            pass_fds=[sock.fileno() for sock in kept],
        )
    finally:
        os.close(shim_log)
    process.returncode = 0  # reaped by springtide.processes.reap, not by Popen
    return dataclasses.replace(entry, shim=processes.identify(process.pid))


def _memory_in_use(setup: NodeSetup, gpu_ids: tuple[str, ...]) -> dict[str, int]:
    read = {gpu_id: setup.memory.memory_used_bytes(gpu_id) for gpu_id in gpu_ids}
    return {gpu_id: used for gpu_id, used in read.items() if used is not None}


def _open_log(path: Path) -> int:
    if path.exists() and path.stat().st_size > 1024 * 1024:
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _environment(setup: NodeSetup, entry: LedgerEntry) -> dict[str, str]:
    """The agent's environment without what is the agent's alone, with the marks by which strays are found."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_FOR_ENGINES)}
    env["PYTHONPATH"] = _import_path(env)
    env[processes.MARKER] = setup.marker
    env[marks.WORKER] = entry.worker_id
    env[marks.INCARNATION] = str(entry.incarnation)
    return env


def _without_python(env: Mapping[str, str]) -> dict[str, str]:
    """An engine's interpreter has packages of its own; the agent's must not come first."""
    return {key: value for key, value in env.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _import_path(env: Mapping[str, str]) -> str:
    """So that a shim finds this package from any working folder."""
    here = str(Path(__file__).resolve().parents[1])
    known = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join([here, *(part for part in known if part != here)])


def _socket_name(runtime_dir: Path, worker_id: str) -> Path:
    path = runtime_dir / worker_id
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        return runtime_dir / hashlib.sha256(worker_id.encode()).hexdigest()[:16]
    return path
