"""The provider `kubernetes`: create, delete and list pods. Whose a pod is stands in its labels."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provisioner.context import ProviderContext, agent_flags
from provisioner.core.provider import CapabilitySet, GroupOrder, OutcomeUnknown, ProvidedNode, Refused
from provisioner.core.room import missing_nodes, named, nodes_of_group
from provisioner.core.sets import capability_set
from provisioner.kubernetes import pods
from provisioner.kubernetes.settings import KubernetesSettings
from springtide.errors import InvalidArgument

log = logging.getLogger(__name__)

_PAGE = 200
_CONFLICT, _NOT_FOUND, _TOO_MANY = 409, 404, 429


class KubernetesProvider:
    """Implements provisioner.core.provider.Provider. `api`: CoreV1Api, blocking; called in threads."""

    def __init__(
        self,
        settings: KubernetesSettings,
        context: ProviderContext,
        api: Any,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises InvalidArgument for a template that is no pod."""
        self._settings = settings
        self._context = context
        self._api = api
        self._clock = clock
        self._template = _read_template(settings.template)
        self._one = asyncio.Lock()

    async def capability_sets(self) -> Sequence[CapabilitySet]:
        s = self._settings
        return [capability_set(s, keep_nodes=s.keep_nodes, gpus_per_node=s.gpus_per_node or s.simulated_gpus)]

    async def start(self, order: GroupOrder) -> None:
        """A pod for each node that has none. Raises Refused, OutcomeUnknown."""
        named(order.group_id)
        s = self._settings
        async with self._one:
            missing_nodes(order, await self._listed(), set_name=s.name, max_nodes=s.max_nodes)
            # Also for pods that are there: a provisioner may have ended between a pod and its secret.
            for node_id in order.node_ids:
                await self._create(order, node_id)

    async def stop(self, group_id: str, node_ids: Sequence[str]) -> None:
        """Deletes the group's pods, ended ones too; their secrets go with them."""
        named(group_id)
        async with self._one:
            for node in nodes_of_group(group_id, await self._listed()):
                name = pods.pod_name(node.node_id)
                await self._call(
                    self._api.delete_namespaced_pod, name, self._settings.namespace, allowed=(_NOT_FOUND, _CONFLICT)
                )

    async def list(self) -> Sequence[ProvidedNode]:
        """All pods with this provisioner's labels; ended ones until they are deleted."""
        async with self._one:
            return [node for _, node in sorted((await self._listed()).items())]

    async def close(self) -> None:
        """Pods stay."""
        self._api.api_client.close()

    # ------------------------------------------------------------ calls

    async def _listed(self) -> dict[str, ProvidedNode]:
        """By node id. Raises OutcomeUnknown."""
        selector = f"{pods.PROVISIONER}={pods.label(self._context.provisioner_id)}"
        found: dict[str, ProvidedNode] = {}
        page: dict[str, Any] = {}
        while True:
            try:
                answer = await self._call(
                    self._api.list_namespaced_pod,
                    self._settings.namespace,
                    label_selector=selector,
                    limit=_PAGE,
                    **page,
                )
            except Refused as error:
                raise OutcomeUnknown(error.message) from None
            plain = self._api.api_client.sanitize_for_serialization(answer)
            for one, typed in zip(plain.get("items", ()), answer.items, strict=True):
                one.setdefault("status", {})["startTime"] = typed.status.start_time if typed.status else None
                node = pods.node_of(one, self._context.provisioner_id, self._clock())
                if node is not None:
                    found[node.node_id] = node
            token = (plain.get("metadata") or {}).get("continue")
            if not token:
                return found
            page = {"_continue": token}

    async def _create(self, order: GroupOrder, node_id: str) -> None:
        s, namespace = self._settings, self._settings.namespace
        flags = agent_flags(node_id, s.data_dir, self._context.agent_labels(s.labels), s.resources)
        environment = self._context.agent_environment(order)
        body = pods.pod(s, order, node_id, self._context.provisioner_id, flags, environment, self._template)
        made = await self._call(self._api.create_namespaced_pod, namespace, body, allowed=(_CONFLICT,))
        if made is None:  # it is there
            made = await self._call(self._api.read_namespaced_pod, pods.pod_name(node_id), namespace)
            whose = made.metadata.annotations or {}
            if whose.get(pods.NODE) != node_id or whose.get(pods.PROVISIONER) != self._context.provisioner_id:
                message = f"The pod {namespace}/{made.metadata.name} is there and belongs to somebody else."
                raise Refused("WORKER_GROUP_TOO_MUCH", message)
        else:
            log.info("pod %s/%s runs node %s", namespace, made.metadata.name, node_id, extra={"node": node_id})
        if environment:
            secret = pods.secret(s, node_id, environment, made.metadata.uid)
            await self._call(self._api.create_namespaced_secret, namespace, secret, allowed=(_CONFLICT,))

    async def _call(self, method: Callable[..., Any], *arguments: Any, allowed: Sequence[int] = (), **more: Any) -> Any:
        """None for a status in `allowed`. Raises Refused for what the API says no to, OutcomeUnknown for the rest."""
        import urllib3.exceptions
        from kubernetes.client.exceptions import ApiException

        try:
            return await asyncio.to_thread(method, *arguments, _request_timeout=self._settings.timeout_s, **more)
        except ApiException as error:
            if error.status in allowed:
                return None
            told = f"Kubernetes: {error.status} {error.reason}: {_message(error.body)}"
            if error.status and 400 <= error.status < 500 and error.status != _TOO_MANY:
                raise Refused("WORKER_GROUP_TOO_MUCH", told) from None
            raise OutcomeUnknown(told) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise OutcomeUnknown(f"Kubernetes: {error}") from None


def _message(body: Any) -> str:
    """Of a Status object, without the request that it may quote."""
    try:
        return str(json.loads(body)["message"])[:500]
    except (TypeError, ValueError, KeyError):
        return ""


def _read_template(path: str) -> dict[str, Any]:
    if not path:
        return {}
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise _bad_template(path, f"cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict) or found.get("kind", "Pod") != "Pod":
        raise _bad_template(path, "is no pod")
    return found


def _bad_template(path: str, problem: str) -> InvalidArgument:
    remedy = "Write a pod: metadata and spec, with a container `agent`."
    return InvalidArgument(field="provider.template", value=path, problem=problem, remedy=remedy)
