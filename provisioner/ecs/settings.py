"""Settings of the provider `ecs`: table [provider] of the provisioner's file."""

from collections.abc import Mapping
from dataclasses import dataclass

from springtide.config import setting
from springtide.errors import InvalidArgument


@dataclass(frozen=True)
class EcsSettings:
    """How tasks are asked for, and what runs in them. Credentials come from where boto3 finds them, never from here."""

    name: str = setting("ecs", doc="Name of the capability set.")
    cluster: str = setting("default", doc="Cluster that the tasks run in.")
    task_definition: str = setting("", doc="family or family:revision; its image has Springtide and an engine.")
    container: str = setting("nodeagent", doc="Container of the task definition that runs the agent.")
    launch_type: str = setting("", doc="EC2, FARGATE or EXTERNAL. Empty: the cluster's default.")
    capacity_provider: str = setting("", doc="Capacity provider instead of a launch type, e.g. FARGATE_SPOT.")
    subnets: tuple[str, ...] = setting((), doc="Of awsvpc tasks.")
    security_groups: tuple[str, ...] = setting((), doc="Of awsvpc tasks.")
    assign_public_ip: bool = setting(False, doc="Of awsvpc tasks.")
    max_nodes: int = setting(4, doc="Most tasks at a time.", minimum=0, maximum=4096)
    keep_nodes: int = setting(0, doc="Have so many whatever the pools ask for.", minimum=0, maximum=4096)
    gpus_per_node: int = setting(0, doc="GPUs of one task, as its task definition says.", minimum=0, maximum=64)
    labels: Mapping[str, str] = setting(default_factory=dict, doc="Labels of the nodes, for placement.")
    resources: Mapping[str, int] = setting(default_factory=dict, doc="Countable units of one node.")
    spot: bool = setting(False, doc="Tasks may be interrupted.")
    cost_per_hour: float = setting(0.0, doc="Of one node, in any currency.", minimum=0)
    agent_host: str = setting("", doc="Address that shims listen on. Default: the task's own.")
    agent_insecure: bool = setting(False, doc="Shims may listen on a network address (plain HTTP): a trusted network.")
    python: str = setting("python3", doc="Python of the agent in the container.")
    data_dir: str = setting("/var/lib/springtide", doc="Folder of the agent in the container.")
    region: str = setting("", doc="Default: as boto3 finds it.")
    endpoint_url: str = setting("", doc="Another endpoint, e.g. of a private link.")
    connect_timeout_s: float = setting(5.0, doc="Of one call.", unit="s", minimum=0.1)
    read_timeout_s: float = setting(20.0, doc="Of one call.", unit="s", minimum=0.1)

    def check(self) -> None:
        """Raises InvalidArgument for what `setting` cannot say."""
        if not self.task_definition:
            raise InvalidArgument(
                field="provider.task_definition",
                value="",
                problem="is not set",
                remedy="Name the task definition whose container runs the agent.",
            )
        if self.launch_type and self.capacity_provider:
            raise InvalidArgument(
                field="provider.launch_type",
                value=self.launch_type,
                problem=f"excludes capacity_provider = {self.capacity_provider!r}",
                remedy="Set one of the two.",
            )
