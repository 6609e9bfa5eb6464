"""Other projects' autoscaling algorithms, re-implemented from what they publish, for comparison in simulation.

None of this is their code. Each is a policy with the interface of ours; defaults are theirs, and where a project makes
its users choose a number, the module says which one stands here. They see what ours see: loads once per second.
"""

from collections.abc import Mapping

from controlplane.core.policies import Factory, register
from simulator.peers.dynamo import DynamoLoad
from simulator.peers.knative import KnativeKpa
from simulator.peers.ray_serve import RayServe
from simulator.peers.skyserve import SkyServe
from simulator.peers.wva import LlmdWva

PEERS: Mapping[str, Factory] = {
    RayServe.title: RayServe.read,
    KnativeKpa.title: KnativeKpa.read,
    SkyServe.title: SkyServe.read,
    LlmdWva.title: LlmdWva.read,
    DynamoLoad.title: DynamoLoad.read,
}


def register_peers() -> None:
    """Makes them known to `make_policy`, in this process."""
    for name, factory in PEERS.items():
        register(name, factory)
