"""The process itself: what it says when it cannot start, what it leaves on the disk, and how it ends."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from provisioner import registry
from provisioner.config import read_config
from provisioner.context import ProviderContext, agent_flags
from provisioner.core.provider import GroupOrder, Phase, Refused
from provisioner.static import create
from springtide.errors import InvalidArgument
from tests.system.stack import ROOT, wait_for


def run(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "provisioner", "--data-dir", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


@pytest.fixture
def static(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A running one; no control plane answers it."""
    config = tmp_path / "p.toml"
    config.write_text('[[provider.sets]]\nname = "rack"\nnodes = ["n1", "n2"]\ngpus_per_node = 4\n')
    command = [sys.executable, "-m", "provisioner", "--kind", "static", "--config", str(config), "--metrics-port", "0"]
    command += ["--data-dir", str(tmp_path / "data"), "--controlplane", "127.0.0.1:1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_discovery_metrics_lock_and_an_orderly_end(static: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """CM9, NA13: it lives without a control plane, one process for each folder, SIGTERM is exit 0."""
    path = tmp_path / "data" / "provisioner.json"
    found = wait_for("the discovery file", lambda: json.loads(path.read_text()) if path.exists() else None)
    assert (found["pid"], found["provisioner_id"], found["kind"]) == (static.pid, "static", "static")

    def text() -> str:
        with urllib.request.urlopen(f"http://{found['metrics']}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    wanted = 'springtide_provisioner_nodes{capability_set="rack",phase="RUNNING"} 2.0'
    wait_for("the nodes in the metrics", lambda: wanted in text())
    assert "springtide_provisioner_connected 0.0" in text()
    second = run("--kind", "static", folder=tmp_path / "data")
    assert second.returncode == 2
    assert f"process {static.pid}" in second.stderr
    static.send_signal(signal.SIGTERM)
    assert static.wait(20) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "nonesuch"), "kind = 'nonesuch'"),
        (("--kind", "local"), "provider.sets"),
        (("--id", "spaced out"), "id = 'spaced out'"),
        (("--controlplane", "nowhere"), "controlplane = 'nowhere'"),
    ],
)
def test_a_start_that_cannot_work_says_one_line(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """Rule 15: exit 2, the field, the value."""
    done = run(*arguments, folder=tmp_path / "data")
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_flags_override_the_file_and_only_when_given(tmp_path: Path) -> None:
    """CM5: file, environment, flags; agents go to the first control plane unless told otherwise."""
    path = tmp_path / "p.toml"
    path.write_text('kind = "static"\nid = "one"\npoll_interval_s = 7.0\n')
    loaded = read_config(["--config", str(path), "--id", "two"], {"SPRINGTIDE_ADDRESS": "cp.example:7400"})
    assert (loaded.kind, loaded.provisioner_id, loaded.poll_interval_s) == ("static", "two", 7.0)
    assert loaded.agent_controlplane == "cp.example:7400"
    path.write_text("pol_interval_s = 7.0\n")
    with pytest.raises(InvalidArgument, match="pol_interval_s"):
        read_config(["--config", str(path)], {})


def test_plug_ins_are_found_by_their_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PV1: a module with `create`, or the function itself."""
    points = EntryPoints(
        [
            EntryPoint("mine", "provisioner.static", registry.GROUP),
            EntryPoint("yours", "provisioner.static:create", registry.GROUP),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    assert registry.load_create("mine") is create
    assert registry.load_create("yours") is create
    with pytest.raises(InvalidArgument, match="mine, yours"):
        registry.load_create("theirs")


async def test_static_tells_and_refuses(tmp_path: Path) -> None:
    """PV2: its nodes are there; none is started or stopped."""
    context = ProviderContext("rack", tmp_path, "127.0.0.1:1")
    provider = create({"sets": [{"name": "a", "nodes": ["n1", "n2"], "gpus_per_node": 8}]}, context)
    assert [(node.node_id, node.phase) for node in await provider.list()] == [
        ("n1", Phase.RUNNING),
        ("n2", Phase.RUNNING),
    ]
    await provider.start(GroupOrder("n1", "a", ("n1",)))
    with pytest.raises(Refused, match="somebody else"):
        await provider.start(GroupOrder("n9", "a", ("n9",)))
    with pytest.raises(Refused):
        await provider.stop("n1", ("n1",))
    with pytest.raises(InvalidArgument, match="named twice"):
        create({"sets": [{"name": "a", "nodes": ["n1", "n1"]}]}, context)


def test_agents_get_their_secret_in_the_environment_only() -> None:
    """Rule 13."""
    context = ProviderContext("p1", Path("/nowhere"), "cp:7400", tls_ca="/etc/ca.pem")
    order = GroupOrder("g", "a", ("g",), join_token="secret")
    assert context.agent_environment(order) == {
        "SPRINGTIDE_ADDRESS": "cp:7400",
        "SPRINGTIDE_TOKEN": "secret",
        "SPRINGTIDE_TLS_CA": "/etc/ca.pem",
    }
    flags = agent_flags("g", "/data", context.agent_labels({"zone": "a"}), {"disks": 2})
    assert "secret" not in " ".join(flags)
    assert flags[-6:] == ["--labels", "provisioner=p1", "--labels", "zone=a", "--resources", "disks=2"]
