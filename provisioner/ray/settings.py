"""Settings of the provider `ray`: table [provider] of the provisioner's file."""

from collections.abc import Mapping
from dataclasses import dataclass

from springtide.config import setting


@dataclass(frozen=True)
class RaySettings:
    """Which Ray nodes are used, and what runs on them."""

    address: str = setting("auto", doc="Ray cluster: auto (the one of this host), or host:port of its head.")
    namespace: str = setting("springtide", doc="Ray namespace of the agents' actors.")
    name: str = setting("ray", doc="Capability sets are named NAME-GPUS: ray-8 are the nodes of eight GPUs.")
    max_nodes: int = setting(4096, doc="Most nodes of each set.", minimum=0, maximum=4096)
    greedy: bool = setting(True, doc="Use every node that joins, whatever the pools ask for.")
    cpu_nodes: bool = setting(False, doc="Use Ray nodes without GPUs, too.")
    cpus_per_agent: float = setting(1.0, doc="CPUs of Ray that an agent reserves.", minimum=0)
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes, for placement.")
    spot: bool = setting(False, doc="Ray nodes may leave at any time.")
    cost_per_hour: float = setting(0.0, doc="Of one node, in any currency.", minimum=0)
    agent_host: str = setting("", doc="Address that shims listen on. Default: the node's address in Ray.")
    agent_insecure: bool = setting(False, doc="Shims may listen on a network address (plain HTTP): a trusted network.")
    simulated_gpus: bool = setting(False, doc="The agent counts the GPUs that Ray gave and does not look at them.")
    python: str = setting("", doc="Python of the agent on the nodes. Default: that of Ray's workers.")
    agent_config: str = setting("", doc="File of more settings for the agents (nodeagent.toml), as all nodes see it.")
    data_dir: str = setting("", doc="Folder of the agents on their nodes. Default: below the temporary folder.")
    stop_timeout_s: float = setting(60.0, doc="Longest drain of an agent that is stopped.", unit="s", minimum=0)
    ready_timeout_s: float = setting(
        20.0, doc="Longest wait for the placement group of a node.", unit="s", minimum=0.1, maximum=300
    )
    silence_s: float = setting(
        45.0, doc="A call to Ray that takes longer has an unknown outcome.", unit="s", minimum=0.1, maximum=600
    )
    call_timeout_s: float = setting(5.0, doc="Longest wait for an actor's answer.", unit="s", minimum=0.1)
