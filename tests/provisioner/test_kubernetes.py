"""The provider `kubernetes` against a stand-in of its API that checks every body against the published schema.

No real cluster is run here: what is proven is what is sent and how answers are read, not what a cluster makes of it.
"""

import json
import secrets
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from provisioner.context import ProviderContext
from provisioner.core.provider import OutcomeUnknown, Phase, Provider, Refused
from provisioner.kubernetes import create, pods
from provisioner.kubernetes.settings import KubernetesSettings
from springtide.errors import InvalidArgument
from tests.provisioner.conformance import CHECKS, TOKEN, Rig
from tests.provisioner.stand_ins import kubernetes_server

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


class KubernetesRig(Rig):
    set_name = "kubernetes"
    most = 2

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.id = f"suite-{secrets.token_hex(4)}"
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": address}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "kubeconfig": str(self.kubeconfig),
            "image": "registry.example/springtide:1",
            "max_nodes": self.most,
            "gpus_per_node": 2,
            "requests": {"cpu": "4"},
            "limits": {"memory": "32Gi"},
            "node_selector": {"gpu": "h100"},
            "timeout_s": 5.0,
            **more,
        }

    async def open(self, **more: Any) -> Provider:
        return create(self.settings(**more), ProviderContext(self.id, self.folder, "10.0.0.1:7400", tls_ca="/ca.pem"))

    def ask(self, path: str, body: object | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.address + path, data), timeout=10) as answer:
            return json.load(answer)

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("/test/pods")
        return [pod for pod in found if pod["metadata"]["annotations"]["springtide.io/provisioner"] == self.id]

    def kubelet(self, pod: dict[str, Any], **word: Any) -> None:
        self.ask(f"/test/pods/{pod['metadata']['name']}", word)

    async def real(self) -> int:
        """Pods that live; those that were deleted end, as a kubelet ends them."""
        for pod in self.pods():
            if pod["metadata"].get("deletionTimestamp"):
                self.kubelet(pod, phase="Succeeded")
        return sum(pod["status"]["phase"] in ("Pending", "Running") for pod in self.pods())

    async def cut(self) -> bool:
        self.ask("/test/fail", {"answers": [500]})
        return True

    async def mend(self) -> None:
        """The one failure is over."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kubernetes_server(tmp_path_factory.mktemp("kubernetes")) as found:
        yield found


@pytest.fixture
def rig(tmp_path: Path, address: str) -> Iterator[KubernetesRig]:
    found = KubernetesRig(tmp_path, address)
    yield found
    found.ask("/test/clear", {})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Any, rig: KubernetesRig) -> None:
    """PV1 PV6: the suite that every provider passes."""
    await check(rig)


async def test_a_pod_has_what_was_asked_and_no_secret(rig: KubernetesRig) -> None:
    """Rule 13: the token is in a secret that belongs to the pod; the pod names it only."""
    provider = await rig.open(labels={"zone": "a"})
    order = rig.order()
    await provider.start(order)
    (pod,) = rig.pods()
    assert TOKEN not in json.dumps(pod)
    spec, agent = pod["spec"], pod["spec"]["containers"][0]
    assert spec["restartPolicy"] == "Never"
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert agent["resources"] == {"requests": {"cpu": "4"}, "limits": {"memory": "32Gi", "nvidia.com/gpu": "2"}}
    assert agent["command"][:3] == ["python3", "-m", "nodeagent"]
    assert {"--node-id", order.node_ids[0], "zone=a"} <= set(agent["command"])
    named = {one["name"]: one["valueFrom"].get("secretKeyRef", {}).get("name") for one in agent["env"]}
    assert set(named) == {"POD_IP", "SPRINGTIDE_ADDRESS", "SPRINGTIDE_TOKEN", "SPRINGTIDE_TLS_CA"}
    assert named["SPRINGTIDE_TOKEN"] == pod["metadata"]["name"]
    owners = [owner["uid"] for s in rig.ask("/test/secrets") for owner in s["metadata"]["ownerReferences"]]
    assert owners == [pod["metadata"]["uid"]]
    await provider.stop(order.group_id, order.node_ids)
    assert rig.ask("/test/secrets") == []
    await provider.close()


async def test_a_provisioner_that_ended_between_pod_and_secret(rig: KubernetesRig) -> None:
    """The repeated order completes it; otherwise the pod would wait for ever."""
    provider = await rig.open()
    order = rig.order()
    body = pods.pod(KubernetesSettings(image="i"), order, order.node_ids[0], rig.id, [], {"A": "b"}, {})
    rig.ask("/api/v1/namespaces/springtide/pods", body)
    assert rig.ask("/test/secrets") == []
    await provider.start(order)
    assert len(rig.pods()) == 1
    assert len(rig.ask("/test/secrets")) == 1
    await provider.close()


async def test_states_of_pods(rig: KubernetesRig) -> None:
    """Eviction, preemption, deadline, deletion: each with its reason, before the pod is gone where that is known."""
    provider = await rig.open()
    order = rig.order()
    await provider.start(order)
    (pod,) = rig.pods()
    seen = []
    taint = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for another"}
    for word in (
        {"phase": "Running"},
        {"conditions": [taint]},
        {"conditions": [], "phase": "Failed", "reason": "Evicted"},
        {"reason": "DeadlineExceeded"},
        {"reason": ""},
    ):
        rig.kubelet(pod, **word)
        (node,) = await provider.list()
        seen.append((node.phase, node.reason))
    assert seen == [
        (Phase.RUNNING, ""),
        (Phase.ENDING, "PREEMPTED"),
        (Phase.ENDED, "PREEMPTED"),
        (Phase.ENDED, "TIME_LIMIT"),
        (Phase.ENDED, "NODE_FAIL"),
    ]
    await provider.close()


async def test_the_end_of_a_pod_is_known_from_its_deadline(rig: KubernetesRig, tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(
        "kind: Pod\nmetadata: {labels: {team: a}}\n"
        "spec: {activeDeadlineSeconds: 3600, containers: [{name: agent, volumeMounts: [{name: m, mountPath: /m}]}],"
        " volumes: [{name: m, emptyDir: {}}]}\n"
    )
    provider = await rig.open(template=str(template))
    await provider.start(rig.order())
    (node,) = await provider.list()
    assert node.ends_in_s is not None
    assert 3000 < node.ends_in_s <= 3601
    (pod,) = rig.pods()
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["spec"]["containers"][0]["volumeMounts"] == [{"name": "m", "mountPath": "/m"}]
    await provider.close()


@pytest.mark.parametrize(
    ("status", "raised"), [(403, Refused), (422, Refused), (429, OutcomeUnknown), (503, OutcomeUnknown)]
)
async def test_answers_that_are_no(rig: KubernetesRig, status: int, raised: type[Exception]) -> None:
    """What the API refuses is refused; what it could not say is unknown, and looked up before it is repeated."""
    provider = await rig.open()
    rig.ask("/test/fail", {"answers": [status]})
    with pytest.raises(OutcomeUnknown):
        await provider.list()
    order = rig.order()
    rig.ask("/test/fail", {"answers": [None, status]})  # the look before the start, and the start
    with pytest.raises(raised, match="as the test wants it"):
        await provider.start(order)
    assert await rig.real() == 0
    await provider.start(order)
    assert await rig.real() == 1
    await provider.close()


async def test_many_pods_come_in_pages(rig: KubernetesRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.kubernetes.provider._PAGE", 2)
    provider = await rig.open(max_nodes=7)
    for _ in range(5):
        await provider.start(rig.order())
    assert len(await provider.list()) == 5
    await provider.close()


async def test_a_pod_of_somebody_else_is_left_alone(rig: KubernetesRig) -> None:
    """The same name by accident: refused, and not taken over."""
    order = rig.order()
    theirs = pods.pod(KubernetesSettings(image="i"), order, order.node_ids[0], "another", [], {}, {})
    rig.ask("/api/v1/namespaces/springtide/pods", theirs)
    provider = await rig.open()
    with pytest.raises(Refused, match="belongs to somebody else"):
        await provider.start(order)
    assert await provider.list() == []
    await provider.close()


def test_names_are_what_kubernetes_takes() -> None:
    """One name for one node; what is no DNS label becomes one and stays different."""
    names = [pods.pod_name(node) for node in ("n-1", "N-1", "n_1", "a" * 200, "a" * 201, "-", "ß.x")]
    assert names[0] == "springtide-n-1"
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 and name.replace("-", "a").isalnum() and name.islower() for name in names)
    assert pods.label("a b") != "a b"
    assert len(pods.label("x" * 500)) <= 63


def test_times_are_read_as_the_client_reads_them() -> None:
    pod = {
        "metadata": {"annotations": {pods.PROVISIONER: "p", pods.NODE: "n"}},
        "spec": {"activeDeadlineSeconds": 60},
        "status": {"phase": "Running", "startTime": datetime.fromtimestamp(1000, UTC)},
    }
    found = pods.node_of(pod, "p", 1010.0)
    assert found is not None
    assert found.ends_in_s == 50.0


def test_settings_say_what_is_missing(tmp_path: Path) -> None:
    context = ProviderContext("p", tmp_path, "127.0.0.1:7400")
    with pytest.raises(InvalidArgument, match="image"):
        create({}, context)
