"""An order as a pod, and a pod as a provided node. Plain dictionaries in the API's own JSON form. Pure."""

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from provisioner.core.provider import GroupOrder, Phase, ProvidedNode
from provisioner.kubernetes.settings import KubernetesSettings

PREFIX = "springtide.io/"
PROVISIONER, GROUP, NODE, SET = (PREFIX + key for key in ("provisioner", "group", "node", "capability-set"))
CONTAINER = "agent"
_LABEL_MAX = 63
_PLAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_REASONS = {
    "Evicted": "PREEMPTED",
    "Preempting": "PREEMPTED",
    "Shutdown": "PREEMPTED",
    "Terminated": "PREEMPTED",
    "NodeLost": "NODE_FAIL",
    "NodeAffinity": "NODE_FAIL",
    "UnexpectedAdmissionError": "START_FAILED",
    "OutOfcpu": "START_FAILED",
    "DeadlineExceeded": "TIME_LIMIT",
}


def label(value: str) -> str:
    """As a label's value takes it: what does not fit becomes a hash; the annotation has it whole."""
    if len(value) <= _LABEL_MAX and _PLAIN.fullmatch(value):
        return value
    return "h-" + hashlib.sha256(value.encode()).hexdigest()[:40]


def pod_name(node_id: str) -> str:
    """One name for one node, so that the API itself refuses a second pod. A DNS label."""
    plain = re.sub(r"[^a-z0-9]+", "-", node_id.lower()).strip("-")
    exact = plain == node_id and len(plain) <= 50
    return (
        f"springtide-{plain}"
        if exact
        else f"springtide-{plain[:40]}-{hashlib.sha256(node_id.encode()).hexdigest()[:8]}"
    )


def pod(
    settings: KubernetesSettings,
    order: GroupOrder,
    node_id: str,
    provisioner_id: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    template: Mapping[str, Any],
) -> dict[str, Any]:
    """The pod of one node. Values of `environment` are not in it: it names the secret that has them."""
    found: dict[str, Any] = copy.deepcopy(dict(template))
    found |= {"apiVersion": "v1", "kind": "Pod"}
    metadata, spec = found.setdefault("metadata", {}), found.setdefault("spec", {})
    whose = {PROVISIONER: provisioner_id, GROUP: order.group_id, NODE: node_id, SET: settings.name}
    metadata |= {"name": pod_name(node_id), "namespace": settings.namespace}
    metadata["labels"] = {**metadata.get("labels", {}), **{key: label(value) for key, value in whose.items()}}
    metadata["annotations"] = {**metadata.get("annotations", {}), **whose}
    spec["restartPolicy"] = "Never"  # a pod that ended is a node that is gone; the control plane asks for another one
    spec["terminationGracePeriodSeconds"] = settings.termination_grace_s
    spec.setdefault("automountServiceAccountToken", False)
    if settings.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **settings.node_selector}
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    containers = spec.setdefault("containers", [])
    agent = next((one for one in containers if one.get("name") == CONTAINER), None)
    if agent is None:
        agent = {"name": CONTAINER}
        containers.insert(0, agent)
    _complete(agent, settings, order, node_id, flags, environment)
    return found


def _complete(
    agent: dict[str, Any],
    settings: KubernetesSettings,
    order: GroupOrder,
    node_id: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    if settings.image:
        agent["image"] = settings.image
    own_address = ["--host", "$(POD_IP)"] + (["--insecure"] if settings.agent_insecure else [])
    simulated = ["--gpus", str(settings.simulated_gpus)] if settings.simulated_gpus else []
    agent["command"] = [settings.python, "-m", "nodeagent", *flags, *own_address, *simulated]
    secret = pod_name(node_id)
    agent["env"] = [
        *agent.get("env", []),
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": "TRACEPARENT", "value": order.traceparent} for _ in [0] if order.traceparent),
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key in sorted(environment)),
    ]
    amounts = agent.setdefault("resources", {})
    gpus = {settings.gpu_resource: str(settings.gpus_per_node)} if settings.gpus_per_node else {}
    for kind, wanted in (("requests", settings.requests), ("limits", {**settings.limits, **gpus})):
        if wanted:
            amounts[kind] = {**amounts.get(kind, {}), **wanted}


def secret(settings: KubernetesSettings, node_id: str, environment: Mapping[str, str], pod_uid: str) -> dict[str, Any]:
    """What the agent joins with. It belongs to the pod and goes with it."""
    name = pod_name(node_id)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod_uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": settings.namespace, "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": dict(environment),
    }


def node_of(found: Mapping[str, Any], provisioner_id: str, now: float) -> ProvidedNode | None:
    """`found`: a pod in JSON form. None: it is not ours. A phase that this version does not know counts as pending."""
    metadata, status = found.get("metadata", {}), found.get("status", {})
    whose = metadata.get("annotations") or {}
    if whose.get(PROVISIONER) != provisioner_id or not whose.get(NODE):
        return None
    phase, reason, message = _phase(metadata, status)
    return ProvidedNode(
        node_id=whose[NODE],
        group_id=whose.get(GROUP, ""),
        capability_set=whose.get(SET, ""),
        phase=phase,
        reference=f"{metadata.get('namespace', '')}/{metadata.get('name', '')}",
        reason=reason,
        message=message,
        ends_in_s=_ends_in_s(found.get("spec", {}), status, now),
    )


def _phase(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[Phase, str, str]:
    disruption = next((one for one in status.get("conditions") or () if _is_disruption(one)), None)
    message = str((disruption or {}).get("message") or status.get("message") or "")
    if status.get("phase") in ("Succeeded", "Failed"):
        ended = "AGENT_EXITED" if status["phase"] == "Succeeded" else "NODE_FAIL"
        reason = "PREEMPTED" if disruption else _REASONS.get(status.get("reason", ""), ended)
        return Phase.ENDED, reason, message
    if disruption:
        return Phase.ENDING, "PREEMPTED", message
    if metadata.get("deletionTimestamp"):
        return Phase.ENDING, "CANCELLED", message
    if status.get("phase") == "Running":
        return Phase.RUNNING, "", ""
    return Phase.PENDING, "", ""


def _is_disruption(condition: Mapping[str, Any]) -> bool:
    """Kubernetes says so when a pod is about to be evicted, preempted or drained from its node."""
    return condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"


def _ends_in_s(spec: Mapping[str, Any], status: Mapping[str, Any], now: float) -> float | None:
    """`startTime` is a datetime here, as the client reads it."""
    limit_s, started = spec.get("activeDeadlineSeconds"), status.get("startTime")
    if limit_s is None or started is None:
        return None
    ends_at: float = started.timestamp() + limit_s
    return max(0.0, ends_at - now)
