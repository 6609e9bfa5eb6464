"""The provider `ray`: every Ray node that joins is offered, ordered ones get an agent, those that leave are lost.

All calls to Ray block and are made by one thread, one after another. Nothing is kept that the cluster's own table of
placement groups knows; ends are remembered for a while.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import springtide
from provisioner.context import ProviderContext, agent_flags
from provisioner.core.provider import CapabilitySet, GroupOrder, OutcomeUnknown, Phase, ProvidedNode, Refused
from provisioner.core.room import named
from provisioner.ray.cluster import MARK, Place, RayAway, RayCluster, RayNode
from provisioner.ray.settings import RaySettings

T = TypeVar("T")
ENDED_RETENTION_S = 900.0
MAX_REMEMBERED = 4096
START_FAILED_S = 30.0  # an agent that ends so soon never served


class RayProvider:
    """Implements provisioner.core.provider.Provider."""

    def __init__(self, settings: RaySettings, context: ProviderContext) -> None:
        self._settings = settings
        self._context = context
        self._cluster = RayCluster(settings, context.provisioner_id)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._sets: set[int] = set()  # GPU counts that were ever seen: a set does not vanish with its last node
        self._ended: dict[str, tuple[float, ProvidedNode]] = {}
        self._shut: dict[str, None] = {}

    # ------------------------------------------------------------ the interface

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        """One for each number of GPUs that a live node has. Raises OutcomeUnknown."""
        nodes, taken = await self._call(self._look)
        counts = Counter(node.gpus for node in nodes)
        free = Counter(node.gpus for node in nodes if node.node_id not in taken)
        self._sets |= set(counts)
        s = self._settings
        return [
            CapabilitySet(
                name=self._name(gpus),
                labels=dict(s.labels),
                gpus_per_node=gpus,
                max_nodes=min(s.max_nodes, counts[gpus]),
                spot=s.spot,
                cost_per_hour=s.cost_per_hour,
                available_nodes=free[gpus],
                keep_nodes=min(s.max_nodes, counts[gpus]) if s.greedy else 0,
            )
            for gpus in sorted(self._sets)
        ]

    async def start(self, order: GroupOrder) -> None:
        """An agent on a free Ray node for each node id. Raises Refused, OutcomeUnknown."""
        named(order.group_id)
        if order.group_id in self._shut:
            raise Refused("WORKER_GROUP_SHUTDOWN", f"Group {order.group_id} was shut down before.")
        await self._call(lambda: self._start(order))

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Drains the group's agents; `list` releases their places when they have ended. Raises Refused."""
        named(group_id)
        await self._call(lambda: self._stop(group_id))

    async def list(self) -> Sequence[ProvidedNode]:
        """All agents of this provisioner's id, and ends for a while. Raises OutcomeUnknown."""
        return await self._call(self._list)

    async def close(self) -> None:
        """Agents and their placement groups stay: they are detached."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._cluster.close)
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ in the thread

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._settings.silence_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise OutcomeUnknown(f"Ray did not answer within {self._settings.silence_s:g} s.") from None
        except RayAway as error:
            raise OutcomeUnknown(str(error)) from None

    def _name(self, gpus: int) -> str:
        return f"{self._settings.name}-{gpus}"

    def _look(self) -> tuple[Sequence[RayNode], set[str]]:
        """Live nodes that can be used, and the ids of those that somebody's agent has."""
        nodes = [node for node in self._cluster.nodes() if node.gpus or self._settings.cpu_nodes]
        return nodes, {place.ray_node_id for place in self._cluster.places(of_all=True)}

    def _start(self, order: GroupOrder) -> None:
        places = {place.agent_id: place for place in self._cluster.places()}
        nodes, taken = self._look()
        fitting = [node for node in nodes if self._name(node.gpus) == order.capability_set]
        if not fitting:
            raise Refused("WORKER_GROUP_TOO_MUCH", f"There is no Ray node for {order.capability_set!r}.")
        for agent_id in order.node_ids:
            if agent_id in places or agent_id in self._ended:
                continue
            free = [node for node in fitting if node.node_id not in taken]
            mine = sum(self._name(place.gpus) == order.capability_set for place in places.values())
            if not free or mine >= self._settings.max_nodes:
                raise Refused("WORKER_GROUP_TOO_MUCH", f"All {len(fitting)} Ray nodes of this kind are in use.")
            node = min(free, key=lambda node: node.node_id)
            taken.add(node.node_id)
            name = f"{MARK}:{self._context.provisioner_id}:{order.group_id}:{agent_id}"
            if not self._cluster.take(name, node, self._plan(order, agent_id, node)):
                raise Refused("WORKER_GROUP_TOO_MUCH", f"Ray node {node.node_id[:8]} has no room: others use it.")

    def _plan(self, order: GroupOrder, agent_id: str, node: RayNode) -> Mapping[str, Any]:
        s = self._settings
        root = str(Path(springtide.__file__).resolve().parents[1])
        labels = {**self._context.agent_labels(s.labels), "ray/node": node.node_id[:16]}
        flags = agent_flags(agent_id, "", labels)
        where = flags.index("--data-dir")
        del flags[where : where + 2]  # the keeper knows its node's folders
        flags += ["--controlplane", self._context.agent_controlplane, "--stop-timeout-s", f"{s.stop_timeout_s:g}"]
        return {
            "node_id": agent_id,
            "flags": [
                *flags,
                *(("--insecure",) if s.agent_insecure else ()),
                *(("--config", s.agent_config) if s.agent_config else ()),
            ],
            "environ": self._context.agent_environment(order),
            "python": s.python,
            "import_path": "" if s.python or "site-packages" in root else root,
            "data_dir": s.data_dir,
            "gpus": node.gpus if s.simulated_gpus else None,
            "stop_timeout_s": s.stop_timeout_s,
        }

    def _stop(self, group_id: str) -> None:
        places = [place for place in self._cluster.places() if place.group_id == group_id]
        known = group_id in self._shut or any(node.group_id == group_id for _, node in self._ended.values())
        if not places and not known:
            raise Refused("WORKER_GROUP_ID_NOT_FOUND", f"There is no agent of group {group_id}.")
        for place in places:
            if not self._cluster.tell_to_stop(place.name):
                self._end(place, "RELEASED", "Its keeper was gone.")
        self._shut[group_id] = None
        while len(self._shut) > MAX_REMEMBERED:
            self._shut.pop(next(iter(self._shut)))

    def _list(self) -> Sequence[ProvidedNode]:
        places = self._cluster.places()
        alive = {node.node_id for node in self._cluster.nodes()}
        here = [place for place in places if place.state == "CREATED" and place.ray_node_id in alive]
        statuses = self._cluster.statuses([place.name for place in here])
        found = []
        for place in places:
            if place in here:
                node = self._judge(place, place.name in statuses, statuses.get(place.name))
            elif place.state == "PENDING":
                node = self._node(place, Phase.PENDING, message="Its placement group waits.")
            else:
                node = self._end(place, "NODE_LOST", "Its Ray node has left the cluster.")
            if node.phase is not Phase.ENDED:
                found.append(node)
        now = self._context.clock.now()
        self._ended = {key: kept for key, kept in self._ended.items() if now - kept[0] < ENDED_RETENTION_S}
        return [*found, *(node for _, node in self._ended.values())]

    def _judge(self, place: Place, keeper_lives: bool, status: Mapping[str, Any] | None) -> ProvidedNode:
        if not keeper_lives:
            return self._end(place, "AGENT_LOST", "The actor that kept its agent is dead.")
        if status is None:
            return self._node(place, Phase.RUNNING, message="Its keeper does not answer just now.")
        code = status["code"]
        if code is None:
            return self._node(
                place, Phase.ENDING if status["told"] else Phase.RUNNING, "RELEASED" if status["told"] else ""
            )
        failed = code != 0 and status["ran_s"] < START_FAILED_S
        reason = "RELEASED" if status["told"] else "START_FAILED" if failed else "AGENT_ENDED"
        return self._end(place, reason, f"Its agent ended with {code}. {status['words']}".strip())

    def _end(self, place: Place, reason: str, message: str) -> ProvidedNode:
        """Released at once, so that Ray has the node's GPUs back."""
        self._cluster.release(place)
        node = self._node(place, Phase.ENDED, reason, message)
        self._ended[place.agent_id] = (self._context.clock.now(), node)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.pop(next(iter(self._ended)))
        return node

    def _node(self, place: Place, phase: Phase, reason: str = "", message: str = "") -> ProvidedNode:
        return ProvidedNode(
            node_id=place.agent_id,
            group_id=place.group_id,
            capability_set=self._name(place.gpus),
            phase=phase,
            reference=place.ray_node_id or place.placement_id,
            reason=reason,
            message=message,
        )
