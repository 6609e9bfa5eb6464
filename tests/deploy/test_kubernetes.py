"""The Kubernetes base: rendered by kustomize, checked against the published schemas, its files read by the processes.

No real cluster is run: what is proven is that the API would take it, and that the processes take their files.
"""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import controlplane.config
import provisioner.config
import router.config
from provisioner.kubernetes.provider import _read_template
from provisioner.kubernetes.settings import KubernetesSettings
from springtide.config import load, parse

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "kubernetes"
CLOUDS = ROOT / ".venv-clouds" / "bin"

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def rendered() -> str:
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_api_would_take_it(rendered: str, tmp_path: Path) -> None:
    """PV6: every object, strictly: an unknown field is an error."""
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered)
    done = subprocess.run(
        [str(CLOUDS / "kubernetes-validate"), "--strict", str(path)], capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    kinds = [one["kind"] for one in yaml.safe_load_all(rendered)]
    assert said.count(" passed for resource ") == len(kinds)
    assert {"StatefulSet", "Deployment", "Role", "NetworkPolicy", "ConfigMap"} <= set(kinds)


def test_a_field_that_is_none_would_be_found(rendered: str, tmp_path: Path) -> None:
    """The check itself can fail."""
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered.replace("readinessProbe:", "readynessProbe:"))
    done = subprocess.run([str(CLOUDS / "kubernetes-validate"), "--strict", str(path)], capture_output=True, timeout=60)
    assert done.returncode != 0


def test_what_is_named_is_there(rendered: str) -> None:
    """Volumes, their keys, service accounts and selectors; nothing runs as root, nothing can write its image."""
    objects = list(yaml.safe_load_all(rendered))
    accounts = {one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"}
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = one["spec"]["template"]
        spec: dict[str, Any] = template["spec"]
        assert one["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert spec.get("serviceAccountName", next(iter(accounts))) in accounts
        assert spec["securityContext"]["runAsNonRoot"]
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in spec["volumes"]} | claims
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            _check_command(container["command"], rendered)


def _check_command(command: list[str], rendered: str) -> None:
    assert command[0] == "springtide"
    name = command[command.index("--config") + 1].rpartition("/")[2]
    (config,) = [one for one in yaml.safe_load_all(rendered) if one["kind"] == "ConfigMap"]
    assert name in config["data"]


def test_the_processes_take_their_files() -> None:
    """Unknown keys are errors; what listens on the network has TLS and tokens."""
    files = BASE / "config"
    control = controlplane.config.from_command_line(["--config", str(files / "controlplane.toml")], {})
    assert control.tls_cert
    assert control.token_file
    routed = load(router.config.RouterConfig, str(files / "router.toml"), {}, {})
    assert routed.security.tls_cert
    assert routed.security.token_file
    provisioned = provisioner.config.read_config(["--config", str(files / "provisioner.toml")], {})
    plain = tomllib.loads((files / "provisioner.toml").read_text())["provider"]
    settings = parse(KubernetesSettings, plain, "provider.")
    settings.check()
    assert provisioned.kind == "kubernetes"
    template = _read_template(str(files / "pod.yaml"))
    assert [one["name"] for one in template["spec"]["containers"]] == ["agent"]
