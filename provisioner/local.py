"""Provider `local`: agents on this host as child processes. They outlive the provisioner, which finds them again by its
ledger (written before the spawn) and, where it died in between, by a mark in their environment.

    [provider]
    stop_timeout_s = 60

    [[provider.sets]]
    name = "sim"
    max_nodes = 4
    gpus_per_node = 2       # simulated slots; with `devices`: so many of them for each node

An agent that dies without being told is started again: its shims and engines live on and are adopted. One that dies
too often is given up, and what is left of its node is ended.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provisioner.context import ProviderContext, agent_flags
from provisioner.core.provider import CapabilitySet, GroupOrder, Phase, ProvidedNode, Refused
from springtide import config, processes
from springtide.config import setting
from springtide.errors import InvalidArgument
from springtide.log_file import MAX_LOG_BYTES, bound_log
from springtide.model.codec import from_plain, to_plain

log = logging.getLogger(__name__)

MARK = "SPRINGTIDE_PROVIDED_NODE"
AGENT_LOG = "agent.log"
_KILL_SLACK_S = 15.0  # on top of stop_timeout_s: then the agent and what it started are killed
_ENDED_KEPT_S = 600.0
_RESTARTS = 5  # in a row, each within _RESTART_WINDOW_S of the one before
_RESTART_WINDOW_S = 60.0


@dataclass(frozen=True)
class LocalSet:
    """One [[provider.sets]]."""

    name: str = setting(doc="Name of the capability set.")
    max_nodes: int = setting(1, doc="Most agents at a time.", minimum=0, maximum=256)
    gpus_per_node: int = setting(1, doc="GPU slots of each.", minimum=0, maximum=1024)
    devices: tuple[str, ...] = setting((), doc="Real GPUs to share out, as CUDA_VISIBLE_DEVICES names them.")
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes.")
    resources: Mapping[str, int] = setting(default_factory=dict, doc="Countable units of each node.")
    nodes_per_unit: int = setting(1, doc="Nodes that come and go together.", minimum=1, maximum=64)
    keep_nodes: int = setting(0, doc="Have so many whatever pools ask for.", minimum=0)
    spot: bool = setting(False, doc="May be taken back at any time.")
    cost_per_hour: float = setting(0.0, doc="Of one node; 0: not said.", minimum=0)


@dataclass(frozen=True)
class LocalSettings:
    """The table [provider]."""

    sets: tuple[LocalSet, ...] = setting((), doc="Kinds of nodes.")
    agent_config: str = setting("", doc="TOML file of the agents; what this provider sets overrides it.")
    python: str = setting("", doc="Interpreter of the agents. Default: this one's.")
    stop_timeout_s: float = setting(60.0, doc="Longest drain of an agent that is stopped.", unit="s", minimum=0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One node in the ledger. `agent` None: it was about to be started."""

    node_id: str
    group_id: str
    capability_set: str
    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    agent: processes.ProcessIdentity | None = None
    restarts: int = 0
    started_at: float = 0.0
    stop_at: float | None = None  # when its end was begun
    ended_at: float | None = None
    reason: str = ""
    message: str = ""


def create(plain: Mapping[str, Any], context: ProviderContext) -> "Local":
    """Raises InvalidArgument."""
    settings = config.parse(LocalSettings, plain, "provider.")
    if not settings.sets:
        raise InvalidArgument(
            field="provider.sets",
            value=(),
            problem="is empty",
            remedy="Name at least one [[provider.sets]] with name, max_nodes and gpus_per_node.",
        )
    return Local(settings, context)


class Local:
    def __init__(self, settings: LocalSettings, context: ProviderContext) -> None:
        self._settings = settings
        self._context = context
        self._sets = {found.name: found for found in settings.sets}
        self._nodes = context.data_dir / "nodes"
        self._ledger = context.data_dir / "ledger"
        self._ledger.mkdir(exist_ok=True, mode=0o700)
        self._entries = {entry.node_id: entry for entry in self._read()}

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        return [
            CapabilitySet(
                name=found.name,
                labels=self._context.agent_labels(found.labels),
                gpus_per_node=found.gpus_per_node,
                resources=found.resources,
                max_nodes=self._most(found),
                nodes_per_unit=found.nodes_per_unit,
                spot=found.spot,
                cost_per_hour=found.cost_per_hour,
                keep_nodes=found.keep_nodes,
            )
            for found in self._sets.values()
        ]

    def _most(self, found: LocalSet) -> int:
        if not found.devices or not found.gpus_per_node:
            return found.max_nodes
        return min(found.max_nodes, len(found.devices) // found.gpus_per_node)

    async def start(self, order: GroupOrder) -> None:
        if any(entry.group_id == order.group_id for entry in self._entries.values()):
            return
        found = self._sets.get(order.capability_set)
        if found is None:
            raise Refused("WORKER_GROUP_TOO_MUCH", f"there is no capability set {order.capability_set!r}")
        taken = [entry for entry in self._entries.values() if entry.ended_at is None]
        used = sum(entry.capability_set == found.name for entry in taken)
        if used + len(order.node_ids) > self._most(found):
            raise Refused("WORKER_GROUP_TOO_MUCH", f"{used} of at most {self._most(found)} nodes are given")
        free = [device for device in found.devices if all(device not in entry.devices for entry in taken)]
        if found.devices and len(free) < len(order.node_ids) * found.gpus_per_node:
            message = f"{len(free)} devices of {found.name} are free; nodes of other sets have the rest"
            raise Refused("WORKER_GROUP_TOO_MUCH", message)
        environment = self._context.agent_environment(order)
        for node_id in order.node_ids:
            share, free = tuple(free[: found.gpus_per_node]), free[found.gpus_per_node :]
            self._keep(Entry(node_id, order.group_id, found.name, share, environment))
        for node_id in order.node_ids:
            self._spawn(self._entries[node_id])

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        entries = [entry for entry in self._entries.values() if entry.group_id == group_id]
        if not entries:
            raise Refused("WORKER_GROUP_ID_NOT_FOUND", f"there is no group {group_id}")
        for entry in entries:
            if entry.stop_at is None and entry.ended_at is None:
                self._keep(replace(entry, stop_at=self._context.clock.now()))
                if entry.agent is not None:
                    processes.kill(entry.agent, signal.SIGTERM)

    async def list(self) -> Sequence[ProvidedNode]:
        for node_id in list(self._entries):
            # Read anew each time: an order may come in between, and what it wrote must not be undone.
            try:
                self._look_after(self._entries[node_id])
                with contextlib.suppress(FileNotFoundError):  # in a thread: tens of MiB may be moved
                    await asyncio.to_thread(bound_log, self._nodes / node_id / AGENT_LOG, MAX_LOG_BYTES)
            except OSError:  # of this node; the others are looked after all the same
                log.exception("node %s cannot be looked after", node_id)
        return [_provided(entry) for entry in self._entries.values()]

    async def close(self) -> None:
        """Agents go on."""

    # ------------------------------------------------------------ one node

    def _look_after(self, entry: Entry) -> None:
        now = self._context.clock.now()
        if entry.ended_at is not None:
            if now > entry.ended_at + _ENDED_KEPT_S:
                self._forget(entry)
            return
        if entry.agent is not None:
            processes.reap(entry.agent.pid)
        if entry.agent is not None and processes.lives(entry.agent):
            if entry.stop_at is not None and now > entry.stop_at + self._settings.stop_timeout_s + _KILL_SLACK_S:
                log.error("the agent of node %s does not stop: killed", entry.node_id)
                processes.kill(entry.agent)
        elif entry.stop_at is not None:
            self._end(entry, "RELEASED", "")
        elif entry.restarts >= _RESTARTS and now < entry.started_at + _RESTART_WINDOW_S:
            message = entry.message or f"its agent died {entry.restarts + 1} times; see {self._folder(entry)}"
            self._end(entry, "NODE_FAIL", message)
        elif entry.agent is None:
            self._spawn(entry)  # this process, or the one before, was about to
        else:
            again = entry.restarts + 1 if now < entry.started_at + _RESTART_WINDOW_S else 1
            log.warning("the agent of node %s has died; it is started again", entry.node_id)
            self._spawn(replace(entry, agent=None, restarts=again))

    def _spawn(self, entry: Entry) -> None:
        """Written down before and after. One that the process before had begun to start is found by its mark."""
        mark = f"{self._ledger.resolve()}/{entry.node_id}"
        self._keep(entry)
        found = next((agent for agent, _ in processes.with_variable(MARK, mark, "nodeagent")), None)
        if found is None:
            folder = self._folder(entry)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            environment = {**os.environ, **entry.environment, MARK: mark}
            for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "SPRINGTIDE_TOKEN_FILE"):
                environment.pop(name, None)  # they are the provisioner's own
            if entry.devices:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(entry.devices)
            try:
                with open(folder / AGENT_LOG, "ab") as output:
                    child = subprocess.Popen(
                        self._command(entry),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
            except OSError as error:  # tried again with each look, and given up after as many as an agent's deaths
                log.error("the agent of node %s cannot be started: %s", entry.node_id, error)
                message, now = f"its agent cannot be started: {error}", self._context.clock.now()
                self._keep(replace(entry, restarts=entry.restarts + 1, started_at=now, message=message))
                return
            found = processes.identify(child.pid)
            child.returncode = 0  # it is watched by its identity; Popen need not warn that it lives
        self._keep(replace(entry, agent=found, started_at=self._context.clock.now(), message=""))

    def _command(self, entry: Entry) -> Sequence[str]:
        found = self._sets.get(entry.capability_set) or LocalSet(entry.capability_set)
        command = [self._settings.python or sys.executable, "-m", "nodeagent"]
        if self._settings.agent_config:
            command += ["--config", self._settings.agent_config]
        labels = self._context.agent_labels(found.labels)
        command += agent_flags(entry.node_id, str(self._folder(entry)), labels, found.resources)
        command += ["--stop-action", "drain", "--stop-timeout-s", f"{self._settings.stop_timeout_s:g}"]
        command += ["--controlplane", self._context.agent_controlplane]
        return command if entry.devices else [*command, "--gpus", str(found.gpus_per_node)]

    def _end(self, entry: Entry, reason: str, message: str) -> None:
        """Nothing of the node is left: what an agent that was killed left behind is ended, too."""
        marker = self._marker(entry)
        left = [process for process, _ in processes.with_variable(processes.MARKER, marker)] if marker else []
        for process in left:
            log.warning("process %d of node %s is left over: killed", process.pid, entry.node_id)
            processes.kill(process)
        if left:
            return  # the next look finds whether they are gone
        self._keep(replace(entry, ended_at=self._context.clock.now(), reason=reason, message=message, environment={}))

    def _marker(self, entry: Entry) -> str:
        """What marks the processes of the node; its agent's discovery file has it, unless it left in order."""
        try:
            return str(json.loads((self._folder(entry) / "nodeagent.json").read_bytes())["marker"])
        except (OSError, ValueError, KeyError):
            return ""

    # ------------------------------------------------------------ the ledger

    def _folder(self, entry: Entry) -> Path:
        return self._nodes / entry.node_id

    def _keep(self, entry: Entry) -> None:
        """Replaces the node's file; on return it is on the disk. It may hold the join token: mode 0600."""
        path = self._ledger / f"{entry.node_id}.json"
        partial = path.with_suffix(".new")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(to_plain(entry), file)
            file.flush()
            os.fsync(fd)
        partial.replace(path)
        self._entries[entry.node_id] = entry

    def _forget(self, entry: Entry) -> None:
        (self._ledger / f"{entry.node_id}.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder(entry), ignore_errors=True)
        del self._entries[entry.node_id]

    def _read(self) -> Iterator[Entry]:
        for path in sorted(self._ledger.glob("*.json")):
            try:
                yield from_plain(Entry, json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.error("%s cannot be read, it is put aside: %s", path, error)
                path.replace(path.with_suffix(".corrupt"))


def _provided(entry: Entry) -> ProvidedNode:
    if entry.ended_at is not None:
        phase = Phase.ENDED
    elif entry.stop_at is not None:
        phase = Phase.ENDING
    else:
        phase = Phase.RUNNING
    reference = "" if entry.agent is None else f"pid {entry.agent.pid}"
    reason = entry.reason or ("RELEASED" if phase is Phase.ENDING else "")
    return ProvidedNode(entry.node_id, entry.group_id, entry.capability_set, phase, reference, reason, entry.message)
