"""Control plane, router and local provisioners on this machine: agents come and go by themselves."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc

from springtide import processes
from springtide.v1 import types_pb2 as t
from springtide.v1.controlplane_pb2_grpc import ControlPlaneServiceStub
from tests.system.conftest import ENGINE, TIMING
from tests.system.stack import Stack, wait_for

CERTIFICATES = Path(__file__).parents[1] / "rpc"
RULES = {
    "idle_s": 1.5,
    "register_timeout_s": 30.0,
    "lost_release_s": 5.0,
    "backoff_s": 0.5,
    "rollover_lead_s": 20.0,
}


class LocalStack(Stack):
    """`Stack` whose nodes come from provisioners of kind local."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, timing={**TIMING, "grace_s": 10.0, "lease_s": 8.0}, **options)
        del self.commands["nodeagent"]
        with (folder / "controlplane.toml").open("a") as file:
            file.write("[nodes]\n" + "".join(f"{key} = {value}\n" for key, value in RULES.items()))
        (folder / "agent.toml").write_text("probe_interval_s = 0.2\nheartbeat_interval_s = 0.25\nparallel_starts = 2\n")

    def add_provisioner(self, name: str, *, nodes: int, gpus: int = 2, **kind: Any) -> None:
        """One of kind local with a set `sim`, not started yet."""
        lines = "".join(f"{key} = {str(value).lower()}\n" for key, value in kind.items())
        (self.folder / f"{name}.toml").write_text(
            f'kind = "local"\nid = "{name}"\ncontrolplane = ["{self.address}"]\n'
            f'data_dir = "{self.folder / name}"\npoll_interval_s = 0.3\nreport_interval_s = 0.25\nmetrics_port = 0\n'
            f'[provider]\nagent_config = "{self.folder / "agent.toml"}"\nstop_timeout_s = 20\n'
            f'[[provider.sets]]\nname = "sim"\nmax_nodes = {nodes}\ngpus_per_node = {gpus}\n{lines}'
        )
        self.commands[name] = ["-m", "provisioner", "--config", str(self.folder / f"{name}.toml")]

    def agents(self) -> list[int]:
        """Live agents, whoever started them."""
        found = []
        for pid in self.strays():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"nodeagent" in line:
                    found.append(pid)
        return found

    def pool(self, *, most: int, **spec: Any) -> None:
        spec = {"engine_args": ENGINE, "stop_grace_s": 5.0, "drain_timeout_s": 20.0, **spec}
        self.apply(name="demo", engine="sim", min_workers=0, max_workers=most, policy_name="static", **spec)

    def states(self, *states: str) -> list[t.Node]:
        return [n for n in self.status().nodes if t.NodeState.Name(n.state).removeprefix("NODE_STATE_") in states]

    def wait_nodes(self, state: str, count: int, timeout_s: float = 40.0) -> list[t.Node]:
        wait_for(f"{count} nodes {state}", lambda: len(self.states(state)) == count or None, timeout_s)
        return self.states(state)

    def explain(self) -> str:
        said = [f"{w.worker_id} {w.node_id} {t.WorkerState.Name(w.state)} {w.reason}" for w in self.workers()]
        said += [f"{n.node_id} {t.NodeState.Name(n.state)} {n.reason} {n.reference}" for n in self.status().nodes]
        said += [f"{e.action} {e.target} {e.status} {e.reason} {e.message}" for e in self.events()[-60:]]
        return "\n".join(said)

    def stop(self) -> None:
        """Agents too, which outlive their provisioner."""
        for name in [name for name in self.processes if name not in ("router", "controlplane")]:
            process = self.processes.pop(name)
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for pid in self.agents():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().stop()
        for pid in self.strays():
            found = processes.identify(pid)
            if found is not None:
                processes.kill(found)


class NetworkedStack(LocalStack):
    """The same with a control plane that listens on all addresses: TLS, and a token for everybody."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = folder / "controlplane.toml"
        (folder / "tokens").write_text("operator\n")
        config.write_text(
            f'tls_cert = "{CERTIFICATES / "localhost.pem"}"\ntls_key = "{CERTIFICATES / "localhost-key.pem"}"\n'
            f'token_file = "{folder / "tokens"}"\n' + config.read_text()
        )
        command = self.commands["controlplane"]
        command[command.index("--listen") + 1] = f"0.0.0.0:{self.controlplane_port}"
        self.environ["SPRINGTIDE_TLS_CA"] = str(CERTIFICATES / "localhost.pem")
        self.environ["SPRINGTIDE_TOKEN"] = "operator"

    @property
    def operator(self) -> Any:
        if self._channel is None:
            tls = grpc.ssl_channel_credentials((CERTIFICATES / "localhost.pem").read_bytes())
            shown = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials("operator"))
            self._channel = grpc.secure_channel(self.address, shown)
        return ControlPlaneServiceStub(cast(Any, self._channel))

    def springtide(self, *arguments: str) -> str:
        """What a command says, without its line end."""
        done = subprocess.run(
            [sys.executable, "-m", "springtide.cli", "--address", self.address, *arguments],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()
