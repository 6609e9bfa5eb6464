"""Settings of the provider `kubernetes`: table [provider] of the provisioner's file."""

from collections.abc import Mapping
from dataclasses import dataclass

from springtide.config import setting
from springtide.errors import InvalidArgument


@dataclass(frozen=True)
class KubernetesSettings:
    """How pods are asked for, and what runs in them."""

    name: str = setting("kubernetes", doc="Name of the capability set.")
    namespace: str = setting("springtide", doc="Of the pods and their secrets.")
    image: str = setting("", doc="Image with Springtide and an engine. Not needed when the template names one.")
    template: str = setting(
        "", doc="YAML or JSON file with a pod (metadata and spec) to start from; its container `agent` is completed."
    )
    kubeconfig: str = setting("", doc="Client configuration file. Default: the service account of the own pod.")
    context: str = setting("", doc="Context within the file. Default: its current one.")
    max_nodes: int = setting(4, doc="Most pods at a time.", minimum=0, maximum=4096)
    keep_nodes: int = setting(0, doc="Have so many whatever the pools ask for.", minimum=0, maximum=4096)
    gpus_per_node: int = setting(0, doc="GPUs of one pod.", minimum=0, maximum=64)
    gpu_resource: str = setting("nvidia.com/gpu", doc="Name of the countable GPU resource.")
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes, for placement.")
    resources: Mapping[str, int] = setting(default_factory=dict, doc="Countable units of one node.")
    requests: Mapping[str, str] = setting(default_factory=dict, doc='Of the container, e.g. cpu = "8".')
    limits: Mapping[str, str] = setting(default_factory=dict, doc='Of the container, e.g. memory = "64Gi".')
    node_selector: Mapping[str, str] = setting(default_factory=dict, doc="Kubernetes nodes that pods may run on.")
    priority_class: str = setting("", doc="priorityClassName of the pods.")
    service_account: str = setting("", doc="serviceAccountName of the pods; they need no right to the API.")
    termination_grace_s: int = setting(
        90, doc="From a pod's SIGTERM (which makes the agent drain) to its end.", unit="s", minimum=1, maximum=86_400
    )
    spot: bool = setting(False, doc="Pods may be evicted.")
    cost_per_hour: float = setting(0.0, doc="Of one node, in any currency.", minimum=0)
    agent_insecure: bool = setting(False, doc="Shims may listen on a network address (plain HTTP): a trusted network.")
    python: str = setting("python3", doc="Python of the agent in the container.")
    data_dir: str = setting("/var/lib/springtide", doc="Folder of the agent in the container.")
    simulated_gpus: int = setting(
        0, doc="Simulated GPU slots of the agent instead of real GPUs.", minimum=0, maximum=64
    )
    timeout_s: float = setting(20.0, doc="Of one call to the API.", unit="s", minimum=0.1)

    def check(self) -> None:
        """Raises InvalidArgument for what `setting` cannot say."""
        if not self.image and not self.template:
            raise InvalidArgument(
                field="provider.image",
                value="",
                problem="is not set, and there is no template",
                remedy="Name an image with Springtide and an engine, or a template.",
            )
