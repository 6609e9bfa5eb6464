"""The provider `ecs` against a server that answers as ECS does: the suite of all providers, and what only ECS does."""

import json
import secrets
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from provisioner.context import ProviderContext
from provisioner.core.provider import GroupOrder, OutcomeUnknown, Phase, Refused
from provisioner.ecs import create
from provisioner.ecs.provider import EcsProvider
from provisioner.ecs.settings import EcsSettings
from provisioner.ecs.tasks import newest_of_each, node_of, tags
from springtide.errors import InvalidArgument
from tests.provisioner.conformance import CHECKS, TOKEN, Rig
from tests.provisioner.stand_ins import ecs_server

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]
CLUSTER, FAMILY = "gpus", "springtide-agent"


class World:
    """A cluster and a task definition at the server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ecs: Any = boto3.client("ecs", endpoint_url=address)
        ec2: Any = boto3.client("ec2", endpoint_url=address)
        self.subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        self.group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
        self.ecs.create_cluster(clusterName=CLUSTER)
        container = {"name": "nodeagent", "image": "springtide", "memory": 512, "cpu": 256, "essential": True}
        self.ecs.register_task_definition(
            family=FAMILY,
            networkMode="awsvpc",
            requiresCompatibilities=["FARGATE"],
            cpu="256",
            memory="512",
            containerDefinitions=[container],
        )
        # By itself the server takes a task one state further each time that it is described.
        stay = {"model_name": "ecs::task", "transition": {"progression": "manual", "times": 10**6}}
        self._post("/moto-api/state-manager/set-transition", stay)

    def _post(self, path: str, body: object) -> None:
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), method="POST")
        request.add_header("content-type", "application/json")
        urllib.request.urlopen(request, timeout=10).close()

    def tasks(self) -> list[dict[str, Any]]:
        arns = [
            a for s in ("RUNNING", "STOPPED") for a in self.ecs.list_tasks(cluster=CLUSTER, desiredStatus=s)["taskArns"]
        ]
        if not arns:
            return []
        found: list[dict[str, Any]] = self.ecs.describe_tasks(cluster=CLUSTER, tasks=arns, include=["TAGS"])["tasks"]
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, ecs_server(tmp_path_factory.mktemp("ecs")) as address:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield World(address)


class EcsRig(Rig):
    set_name = "ecs"
    most = 2

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self.world = folder, world
        self.id = f"suite-{secrets.token_hex(4)}"
        self.address = world.address

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "cluster": CLUSTER,
            "task_definition": FAMILY,
            "launch_type": "FARGATE",
            "subnets": [self.world.subnet],
            "security_groups": [self.world.group],
            "max_nodes": self.most,
            "labels": {"zone": "a"},
            "endpoint_url": self.address,
            **more,
        }

    async def open(self) -> EcsProvider:
        context = ProviderContext(self.id, self._folder, "10.0.0.1:7400")
        provider = create(self.settings(), context)
        assert isinstance(provider, EcsProvider)
        return provider

    def mine(self) -> list[dict[str, Any]]:
        wanted = {"key": "springtide:provisioner", "value": self.id}
        return [task for task in self.world.tasks() if wanted in task["tags"] and task["lastStatus"] != "STOPPED"]

    async def real(self) -> int:
        return len(self.mine())


@pytest.fixture
def rig(tmp_path: Path, world: World) -> Iterator[EcsRig]:
    found = EcsRig(tmp_path, world)
    yield found
    for task in found.mine():
        world.ecs.stop_task(cluster=CLUSTER, task=task["taskArn"])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Any, rig: EcsRig) -> None:
    """PV1 PV6: the suite that every provider passes."""
    await check(rig)


async def test_the_agent_is_told_where_to_join_and_argv_keeps_no_secret(rig: EcsRig) -> None:
    """Rule 13: the token is in the container's environment, and in nothing else of the task."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    (task,) = rig.mine()
    (container,) = task["overrides"]["containerOverrides"]
    environment = {one["name"]: one["value"] for one in container["environment"]}
    assert environment == {"SPRINGTIDE_ADDRESS": "10.0.0.1:7400", "SPRINGTIDE_TOKEN": TOKEN}
    command = container["command"]
    assert command[:3] == ["python3", "-m", "nodeagent"]
    assert command[command.index("--node-id") + 1] == order.node_ids[0]
    assert "zone=a" in command
    assert TOKEN not in " ".join(command)
    await provider.close()


async def test_the_cap_is_kept(rig: EcsRig) -> None:
    """PV1: one more than `max_nodes` is refused and nothing is started."""
    provider = await rig.open()
    for _ in range(rig.most):
        await provider.start(rig.order())
    with pytest.raises(Refused, match="2 is the most") as refused:
        await provider.start(rig.order())
    assert refused.value.status == "WORKER_GROUP_TOO_MUCH"
    assert await rig.real() == rig.most
    await provider.close()


async def test_a_server_that_is_away_is_no_absence(rig: EcsRig) -> None:
    """PV1: nobody listens: nothing is known, neither of the list nor of a start."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        rig.address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        provider = await rig.open()
        with pytest.raises(OutcomeUnknown):
            await provider.list()
        with pytest.raises(OutcomeUnknown):
            await provider.start(rig.order())
        await provider.close()


async def test_what_ecs_refuses_is_said_in_its_words(rig: EcsRig) -> None:
    """An unknown task definition: refused, with ECS's own sentence; the next start may succeed."""
    context = ProviderContext(rig.id, Path(), "10.0.0.1:7400")
    provider = create(rig.settings(task_definition="no-such-family"), context)
    with pytest.raises(Refused, match="ECS"):
        await provider.start(rig.order())
    assert await rig.real() == 0
    await provider.close()


async def test_a_task_that_ended_is_not_started_again(rig: EcsRig) -> None:
    """CP15: its group was shut down; the control plane names another one."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    rig.world.ecs.stop_task(cluster=CLUSTER, task=rig.mine()[0]["taskArn"], reason="by hand")
    with pytest.raises(Refused) as refused:
        await provider.start(order)
    assert refused.value.status == "WORKER_GROUP_SHUTDOWN"
    await provider.close()


@pytest.mark.parametrize(
    ("status", "wanted", "code", "phase", "reason"),
    [
        ("PROVISIONING", "RUNNING", "", Phase.PENDING, ""),
        ("RUNNING", "RUNNING", "", Phase.RUNNING, ""),
        ("RUNNING", "STOPPED", "SpotInterruption", Phase.ENDING, "PREEMPTED"),
        ("DEPROVISIONING", "STOPPED", "TerminationNotice", Phase.ENDING, "PREEMPTED"),
        ("STOPPED", "STOPPED", "TaskFailedToStart", Phase.ENDED, "START_FAILED"),
        ("STOPPED", "STOPPED", "UserInitiated", Phase.ENDED, "CANCELLED"),
        ("STOPPED", "STOPPED", "SomethingNew", Phase.ENDED, "STOPPED"),
        ("SOMETHING_NEW", "RUNNING", "", Phase.PENDING, ""),
    ],
)
def test_states_of_tasks(status: str, wanted: str, code: str, phase: Phase, reason: str) -> None:
    """What ECS calls a task's state, and an interrupted spot task before it is gone."""
    task = {"tags": tags("p", "g", "n", "ecs"), "lastStatus": status, "desiredStatus": wanted, "stopCode": code}
    found = node_of(task, "p")
    assert found is not None
    assert (found.node_id, found.group_id, found.phase, found.reason) == ("n", "g", phase, reason)
    assert node_of(task, "somebody-else") is None


def test_of_two_tasks_of_one_node_the_living_one_counts() -> None:
    ended = node_of({"tags": tags("p", "g", "n", "s"), "lastStatus": "STOPPED", "taskArn": "a"}, "p")
    living = node_of({"tags": tags("p", "g", "n", "s"), "lastStatus": "RUNNING", "taskArn": "b"}, "p")
    assert ended is not None
    assert living is not None
    assert newest_of_each([ended, living]) == {"n": living}


def test_settings_say_what_is_missing() -> None:
    context = ProviderContext("p", Path(), "127.0.0.1:7400")
    with pytest.raises(InvalidArgument, match="task_definition"):
        create({}, context)
    with pytest.raises(InvalidArgument, match="excludes capacity_provider"):
        create({"task_definition": "f", "launch_type": "EC2", "capacity_provider": "FARGATE_SPOT"}, context)


async def test_a_client_token_that_is_known_is_no_refusal(tmp_path: Path) -> None:
    """PV7: a repeated call carries a newer join token, and ECS answers that the client token is in use: the task of the
    call before is there, or was. It is looked for; its node is not given up."""
    client = boto3.client("ecs", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    settings = EcsSettings(cluster=CLUSTER, task_definition=FAMILY, max_nodes=1)
    provider = EcsProvider(settings, ProviderContext("p1", tmp_path, "10.0.0.1:7400"), client)
    with Stubber(client) as ecs:
        ecs.add_response("list_tasks", {"taskArns": []})
        ecs.add_response("list_tasks", {"taskArns": []})
        ecs.add_client_error("run_task", "ConflictException", "The clientToken is in use", http_status_code=400)
        with pytest.raises(OutcomeUnknown, match="in use"):
            await provider.start(GroupOrder("g-1", "ecs", ("g-1",)))
