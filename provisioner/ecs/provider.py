"""The provider `ecs`: run, stop and list tasks. Whose a task is stands in its tags; nothing is kept here."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from provisioner.context import ProviderContext, agent_flags
from provisioner.core.provider import CapabilitySet, GroupOrder, OutcomeUnknown, Phase, ProvidedNode, Refused
from provisioner.core.room import missing_nodes, named, nodes_of_group
from provisioner.core.sets import capability_set
from provisioner.ecs.calls import BlockingCalls
from provisioner.ecs.settings import EcsSettings
from provisioner.ecs.tasks import newest_of_each, node_of, tags

log = logging.getLogger(__name__)

_PAGE = 100  # of ListTasks and DescribeTasks
_MAX_TASKS = 10_000
_STARTED_BY_MAX = 36


class EcsProvider:
    """Implements provisioner.core.provider.Provider. `client`: boto3's, blocking, with time-outs of its own; called in
    threads, one at a time but for calls that were given up."""

    def __init__(self, settings: EcsSettings, context: ProviderContext, client: Any) -> None:
        self._settings = settings
        self._context = context
        self._client = client
        self._one = asyncio.Lock()
        self._blocking = BlockingCalls()

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        return [capability_set(self._settings, keep_nodes=self._settings.keep_nodes)]

    async def start(self, order: GroupOrder) -> None:
        """A task for each node that has none. Raises Refused, OutcomeUnknown."""
        named(order.group_id)
        s = self._settings
        async with self._one:
            missing = missing_nodes(order, await self._listed(), set_name=s.name, max_nodes=s.max_nodes)
            for node_id in missing:
                await self._run_task(order, node_id)

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Stops the group's tasks. Raises Refused for an unknown group, OutcomeUnknown."""
        named(group_id)
        async with self._one:
            for node in nodes_of_group(group_id, await self._listed()):
                if node.phase in (Phase.PENDING, Phase.RUNNING):
                    reason = "given back by Springtide"
                    await self._call(
                        self._client.stop_task, cluster=self._settings.cluster, task=node.reference, reason=reason
                    )

    async def list(self) -> Sequence[ProvidedNode]:
        """All tasks with this provisioner's tags; ended ones for as long as ECS shows them (about an hour)."""
        async with self._one:
            return [node for _, node in sorted((await self._listed()).items())]

    async def close(self) -> None:
        """Tasks stay."""
        self._blocking.close()
        self._client.close()

    # ------------------------------------------------------------ calls

    async def _listed(self) -> dict[str, ProvidedNode]:
        """By node id. ECS lists by desired status: both kinds are asked for."""
        arns: list[str] = []
        for status in ("RUNNING", "STOPPED"):
            token: dict[str, str] = {}
            while True:
                page = await self._look(
                    self._client.list_tasks,
                    cluster=self._settings.cluster,
                    startedBy=self._started_by,
                    desiredStatus=status,
                    maxResults=_PAGE,
                    **token,
                )
                arns += page["taskArns"]
                if not page.get("nextToken") or len(arns) >= _MAX_TASKS:
                    break
                token = {"nextToken": page["nextToken"]}
        arns = list(dict.fromkeys(arns))
        found = []
        for first in range(0, len(arns), _PAGE):
            answer = await self._look(
                self._client.describe_tasks,
                cluster=self._settings.cluster,
                tasks=arns[first : first + _PAGE],
                include=["TAGS"],
            )
            found += [node_of(task, self._context.provisioner_id) for task in answer["tasks"]]
        return newest_of_each(node for node in found if node is not None)

    async def _run_task(self, order: GroupOrder, node_id: str) -> None:
        s = self._settings
        where: dict[str, Any] = {}
        if s.launch_type:
            where["launchType"] = s.launch_type
        if s.capacity_provider:
            where["capacityProviderStrategy"] = [{"capacityProvider": s.capacity_provider, "weight": 1}]
        if s.subnets:
            where["networkConfiguration"] = {
                "awsvpcConfiguration": {
                    "subnets": list(s.subnets),
                    "securityGroups": list(s.security_groups),
                    "assignPublicIp": "ENABLED" if s.assign_public_ip else "DISABLED",
                }
            }
        answer = await self._call(
            self._client.run_task,
            cluster=s.cluster,
            taskDefinition=s.task_definition,
            count=1,
            startedBy=self._started_by,
            # A repeated call with the same token is the same task.
            clientToken=hashlib.sha256(f"{order.group_id}/{node_id}".encode()).hexdigest()[:64],
            tags=tags(self._context.provisioner_id, order.group_id, node_id, s.name),
            overrides={"containerOverrides": [self._container(order, node_id)]},
            **where,
        )
        failures = [f"{one.get('reason', '?')} {one.get('detail', '')}".strip() for one in answer.get("failures", ())]
        if failures or not answer["tasks"]:
            raise Refused(
                "WORKER_GROUP_TOO_MUCH", f"ECS has no room for {node_id}: {'; '.join(failures) or 'no task'}."
            )
        log.info("task %s runs node %s", answer["tasks"][0]["taskArn"], node_id, extra={"node": node_id})

    def _container(self, order: GroupOrder, node_id: str) -> dict[str, Any]:
        s = self._settings
        flags = agent_flags(node_id, s.data_dir, self._context.agent_labels(s.labels), s.resources)
        if s.agent_host:
            flags += ["--host", s.agent_host]
        if s.agent_insecure:
            flags.append("--insecure")
        environment = self._context.agent_environment(order)
        if order.traceparent:
            environment["TRACEPARENT"] = order.traceparent
        return {
            "name": s.container,
            "command": [s.python, "-m", "nodeagent", *flags],
            "environment": [{"name": key, "value": value} for key, value in environment.items()],
        }

    @property
    def _started_by(self) -> str:
        """A filter of ListTasks, at most 36 characters; the tags decide."""
        plain = f"springtide/{self._context.provisioner_id}"
        if len(plain) <= _STARTED_BY_MAX:
            return plain
        return "springtide/" + hashlib.sha256(plain.encode()).hexdigest()[: _STARTED_BY_MAX - 11]

    async def _look(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """A call that changes nothing: without an answer nothing is known. Raises OutcomeUnknown."""
        try:
            return await self._call(method, **arguments)
        except Refused as error:
            raise OutcomeUnknown(error.message) from None

    async def _call(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Raises Refused for what ECS says no to, OutcomeUnknown for the rest."""
        import botocore.exceptions as boto

        try:
            return await self._blocking.run(method, **arguments)
        except boto.ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            code = error.response.get("Error", {}).get("Code", "")
            # ConflictException: the client token is known, with another join token. So an earlier call had its effect.
            if 400 <= status < 500 and "Throttl" not in code and code != "ConflictException":
                raise Refused("WORKER_GROUP_TOO_MUCH", f"ECS: {error}") from None
            raise OutcomeUnknown(f"ECS: {error}") from None
        except boto.NoCredentialsError as error:
            raise Refused("WORKER_GROUP_TOO_MUCH", f"ECS: {error}.") from None
        except boto.BotoCoreError as error:
            raise OutcomeUnknown(f"ECS: {error}") from None
