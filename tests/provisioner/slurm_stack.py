"""Control plane, router and SLURM provisioner beside a virtual cluster, and a load that goes on meanwhile."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from springtide.v1 import types_pb2 as t
from tests.provisioner.slurm_cluster import VirtualCluster
from tests.system.load import Report, Result, ask
from tests.system.stack import ROOT, Stack
from tests.system.trace import Arrival

INTERVAL_S = 0.15


class SlurmStack(Stack):
    """`Stack` without an agent of its own: nodes come from the cluster. Agents' folders are below `folder`/agents."""

    def __init__(
        self, folder: Path, cluster: VirtualCluster, *, provider: Mapping[str, Any], nodes: str = "", **options: Any
    ) -> None:
        super().__init__(folder, environ=cluster.environ, **options)
        self.cluster = cluster
        self.most_jobs = 0
        del self.commands["nodeagent"]
        if nodes:
            with (folder / "controlplane.toml").open("a") as file:
                file.write("[nodes]\n" + nodes)
        settings = {"data_dir": f"{folder}/agents/$SLURM_JOB_ID", **provider}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        self.provisioner_config = folder / "provisioner.toml"
        self.provisioner_config.write_text(
            f'kind = "slurm"\nid = "hpc"\ncontrolplane = ["{self.address}"]\ndata_dir = "{folder}/provisioner"\n'
            "poll_interval_s = 0.5\nreport_interval_s = 0.25\n[provider]\n" + "\n".join(lines) + "\n"
        )
        self.commands["provisioner"] = ["-m", "provisioner", "--config", str(self.provisioner_config)]

    def jobs(self, *states: str) -> dict[str, str]:
        """Node name by job id of our jobs, in these states (live ones: none given)."""
        wanted = ",".join(states) or "PD,CF,R,CG,S"
        found = self.cluster.run("squeue", "-h", "-t", wanted, "-o", "%i|%j|%N")
        rows = (line.split("|") for line in found.splitlines())
        ours = {job: node for job, name, node in rows if name.startswith("springtide:hpc:")}
        if not states:
            self.most_jobs = max(self.most_jobs, len(ours))
        return ours

    def told(self, job: str) -> str:
        """How the provisioner tells of a job: its line of `python -m provisioner.slurm jobs`."""
        lines = self._operate("jobs").splitlines()
        return next((line for line in lines if line.split()[0] == job), "")

    def cancel_jobs(self) -> None:
        """As an operator does at the end."""
        self._operate("cancel")

    def _operate(self, action: str) -> str:
        command = [sys.executable, "-m", "provisioner.slurm", action, "--config", str(self.provisioner_config)]
        done = subprocess.run(command, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nodes_up(self) -> list[t.Node]:
        return [node for node in self.status().nodes if node.state == t.NODE_STATE_UP]

    def stop(self) -> None:
        provisioner = self.processes.pop("provisioner", None)
        if provisioner is not None:
            provisioner.terminate()
            try:
                provisioner.wait(15)
            except subprocess.TimeoutExpired:
                provisioner.kill()
                provisioner.wait(10)
        super().stop()

    def explain(self) -> str:
        """For a failing assertion."""
        said = [f"{w.worker_id} {w.node_id} {t.WorkerState.Name(w.state)} {w.reason}" for w in self.workers()]
        said += [f"{n.node_id} {t.NodeState.Name(n.state)} {n.reason} {n.reference}" for n in self.status().nodes]
        said += [f"{e.action} {e.target} {e.status} {e.reason} {e.message}" for e in self.events()[-60:]]
        return "\n".join([*said, str(self.cluster.jobs()), self.log("provisioner")[-3000:]])


class Load:
    """One streamed request every INTERVAL_S, from a thread, until `stop`; nothing may fail."""

    def __init__(self, base: str, model: str, tokens: int = 60) -> None:
        self._base, self._model, self._tokens = base, model, tokens
        self._over = threading.Event()
        self.results: list[Result] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        pending: set[asyncio.Task[None]] = set()
        number = 0
        while not self._over.is_set():
            task = asyncio.create_task(self._one(number))
            pending.add(task)
            task.add_done_callback(pending.discard)
            number += 1
            await asyncio.sleep(INTERVAL_S)
        await asyncio.gather(*pending)

    async def _one(self, number: int) -> None:
        arrival = Arrival(number, 0.0, 40, self._tokens + number % 40)
        self.results.append(await ask(self._base, self._model, arrival, salt=str(os.getpid()), timeout_s=120.0))

    def stop(self) -> Report:
        """All results, when the last request has ended."""
        self._over.set()
        self._thread.join(150)
        assert not self._thread.is_alive(), "requests do not end"
        return Report(self.results)
