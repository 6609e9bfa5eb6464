"""What the provider does with Ray: placement groups and actors, in calls that block and raise `RayAway`.

Truth is the cluster's table of placement groups: each of ours is named by a mark, and outlives us.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from provisioner.ray import keeper
from provisioner.ray.settings import RaySettings
from springtide import log_file

log = logging.getLogger(__name__)

MARK = "springtide"
_NODE_ID = "ray.io/node-id"


class RayAway(Exception):
    """The cluster did not answer: what was asked may have happened."""


@contextmanager
def answering() -> Iterator[None]:
    """Whatever goes wrong inside is RayAway: Ray raises errors of its own, of gRPC, RuntimeError and TimeoutError."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above; nothing here is ours to go wrong
        raise RayAway(f"Ray does not answer: {type(error).__name__}: {error}") from None


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node of the cluster."""

    node_id: str
    host: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Place:
    """A placement group of ours. `state`: PENDING, CREATED, RESCHEDULING (its node is gone)."""

    name: str
    group_id: str
    agent_id: str  # the node id that the control plane gave
    placement_id: str
    state: str
    ray_node_id: str
    gpus: int


class RayCluster:
    """One connection, made at the first call and again when it is lost. Used from one thread."""

    def __init__(self, settings: RaySettings, provisioner_id: str) -> None:
        self._settings = settings
        self._id = provisioner_id
        for module in (keeper, log_file):  # nodes need no copy of this package for them
            ray.cloudpickle.register_pickle_by_value(module)

    def connect(self) -> None:
        """Raises RayAway."""
        if ray.is_initialized():
            return
        with answering():
            ray.init(
                address=self._settings.address,
                namespace=self._settings.namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )

    def close(self) -> None:
        if ray.is_initialized():
            ray.shutdown()

    # ------------------------------------------------------------ looks

    def nodes(self) -> list[RayNode]:
        """All live nodes."""
        self.connect()
        with answering():
            return [
                RayNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
                for node in ray.nodes()
                if node["Alive"]
            ]

    def places(self, *, of_all: bool = False) -> list[Place]:
        """Placement groups of this provisioner, or of all of them."""
        self.connect()
        with answering():
            table = placement_group_table()
        found = []
        for placement_id, row in table.items():
            parts = str(row["name"]).split(":")
            if len(parts) != 4 or parts[0] != MARK or row["state"] == "REMOVED":
                continue
            if of_all or parts[1] == self._id:
                where = next(iter(row["bundles_to_node_id"].values()), "")
                bundle: dict[str, float] = next(iter(row["bundles"].values()), {})
                gpus = int(bundle.get("GPU", 0))
                found.append(Place(row["name"], parts[2], parts[3], placement_id, row["state"], where, gpus))
        return found

    def statuses(self, names: list[str]) -> dict[str, dict[str, Any] | None]:
        """Each keeper's status; None: it did not answer in time. A keeper that is dead is missing."""
        asked: dict[Any, str] = {}
        found: dict[str, dict[str, Any] | None] = {}
        for name in names:
            actor = self.actor(name)
            if actor is not None:
                asked[actor.status.remote()] = name
        if not asked:
            return found
        with answering():
            done, late = ray.wait(list(asked), num_returns=len(asked), timeout=self._settings.call_timeout_s)
            found.update({asked[ref]: None for ref in late})
            for ref in done:
                try:
                    found[asked[ref]] = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    log.info("the keeper of %s is dead: %s", asked[ref], str(error).partition("\n")[0])
        return found

    def actor(self, name: str) -> Any | None:
        """The keeper of that name; None when there is none, or it is dead."""
        with answering():
            try:
                return ray.get_actor(name, namespace=self._settings.namespace)
            except ValueError:
                return None

    # ------------------------------------------------------------ orders

    def take(self, name: str, node: RayNode, plan: Mapping[str, Any]) -> bool:
        """Pins a placement group to that very node, and starts the keeper in it. False: it has no room."""
        s = self._settings
        bundle = {"CPU": s.cpus_per_agent, **({"GPU": float(node.gpus)} if node.gpus else {})}
        with answering():
            group = placement_group(
                [bundle], name=name, lifetime="detached", bundle_label_selector=[{_NODE_ID: node.node_id}]
            )
            if not group.wait(s.ready_timeout_s):
                remove_placement_group(group)
                return False
            ray.remote(keeper.AgentKeeper).options(
                name=name,
                namespace=s.namespace,
                lifetime="detached",
                num_cpus=s.cpus_per_agent,
                num_gpus=node.gpus,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ).remote({**plan, "host": s.agent_host or node.host})
            return True

    def tell_to_stop(self, name: str) -> bool:
        """False: there is no keeper."""
        actor = self.actor(name)
        if actor is None:
            return False
        with answering():
            try:
                ray.get(actor.stop.remote(), timeout=self._settings.call_timeout_s)
            except ray.exceptions.RayActorError:
                return False
            return True

    def release(self, place: Place) -> None:
        """Ends the keeper, and gives the node's resources back to Ray."""
        actor = self.actor(place.name)
        with answering():
            if actor is not None:
                ray.kill(actor)
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(place.placement_id)))
