"""What a node will hold: room for workers on nodes that are not there yet, or cannot be reached right now."""

from collections.abc import Mapping
from dataclasses import dataclass

from springtide.model.pool import PoolSpec
from springtide.model.provisioning import CapabilitySet


@dataclass(slots=True)
class Room:
    """GPUs and units of one node that nobody has been promised yet. Mutable: `take` promises."""

    node_id: str
    labels: Mapping[str, str]
    gpus: int
    free: int
    resources: dict[str, int]
    spot: bool = False
    used: bool = False

    def fits(self, spec: PoolSpec) -> bool:
        """As controlplane.core.placement sees it once the node is up."""
        size = spec.tensor_parallel_size
        return (
            fits_labels(spec, self.labels)
            and fits_gpus(self.gpus, size)
            and self.free >= size
            and all(self.resources.get(key, 0) >= amount for key, amount in spec.resources.items())
        )

    def take(self, spec: PoolSpec) -> None:
        self.used = True
        self.free -= spec.tensor_parallel_size
        for key, amount in spec.resources.items():
            self.resources[key] = self.resources.get(key, 0) - amount


def fits_labels(spec: PoolSpec, labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in spec.placement.items())


def fits_gpus(gpus: int, tensor_parallel_size: int) -> bool:
    return gpus >= tensor_parallel_size and gpus % tensor_parallel_size == 0


def workers_of_node(spec: PoolSpec, found: CapabilitySet, labels: Mapping[str, str]) -> int:
    """How many workers of the pool an empty node of the set holds; 0: none fits."""
    if not fits_labels(spec, labels) or not fits_gpus(found.gpus_per_node, spec.tensor_parallel_size):
        return 0
    counts = [found.gpus_per_node // spec.tensor_parallel_size]
    counts += [found.resources.get(key, 0) // amount for key, amount in spec.resources.items() if amount > 0]
    return max(0, min(counts))
