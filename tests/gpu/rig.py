"""The whole system on this host's GPUs, one pool on it, and the facts that each step finds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from nodeagent.engines.http import EngineHttp
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.gpu.devices import Devices
from tests.gpu.engines import Kit
from tests.system.stack import ROOT, Stack, wait_for

MIB = 1 << 20
SLACK_BYTES = 1 << 30
POLICY = {"enable_elastic": False}


class Rig:
    """A stack of one node with all GPUs of this host, and a pool of one engine."""

    def __init__(self, kit: Kit, folder: Path) -> None:
        self.kit = kit
        self.devices = Devices(kit.simulated)
        self.facts: dict[str, Any] = {}  # of the step that runs
        self.pool = "proof"
        self._folder = folder
        self.model = self.make_model("model", seed=1)
        self._patience_s = kit.start_s
        self.idle_bytes = self.devices.used_bytes()
        self.gpus = len(self.idle_bytes) if self.devices.there else 4
        config = "parallel_starts = 1\n[launch]\n"
        if kit.interpreter:
            config += f'allowed_interpreters = ["{kit.interpreter}"]\n'
        environ = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        self.stack = Stack(folder, gpus=self.gpus, agent_config=config, environ=environ)
        if not kit.simulated:
            command = self.stack.commands["nodeagent"]
            at = command.index("--gpus")
            del command[at : at + 2]  # the agent asks NVML

    def make_model(self, name: str, seed: int) -> str:
        """A folder with a small model; other weights with another seed."""
        out = self._folder / name
        if self.kit.engine == "sim":
            out.mkdir()
            return str(out)
        script = ROOT / "scripts" / "gpu_model.py"
        command = [self.kit.interpreter, str(script), str(out), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return str(out)

    def start(self) -> None:
        self.stack.start()
        wait_for("the node", lambda: self.stack.status().nodes)

    # ------------------------------------------------------------ orders

    def apply(self, tensor_parallel_size: int = 1, **spec: Any) -> None:
        """The pool with its engine's flags."""
        args = (*self.kit.args, *self.kit.sleep_args)
        self.stack.apply(
            name=self.pool,
            engine=self.kit.engine,
            model=self.model,
            tensor_parallel_size=tensor_parallel_size,
            interpreter=self.kit.interpreter,
            engine_args=args,
            min_workers=spec.pop("min_workers", 1),
            max_workers=spec.pop("max_workers", 2),
            start_timeout_s=self.kit.start_s,
            drain_timeout_s=60,
            stop_grace_s=15,
            policy=POLICY,
            **spec,
        )

    def renew(self, pool: str, **spec: Any) -> None:
        """Another pool in the place of this one, whose workers are gone and whose memory is free before."""
        self.stack.operator.DeletePool(cp.DeletePoolRequest(name=self.pool, drain=True), timeout=5)
        wait_for("no worker", lambda: not self.stack.workers("ACTIVE", "DRAINING", "STARTING"), 120)
        self.facts["memory_free_after_s"] = self.wait_free(self.all_gpus)
        self.pool, self._patience_s = pool, self.kit.start_s
        self.apply(**spec)

    @property
    def all_gpus(self) -> list[int]:
        return list(range(len(self.devices.handles)))

    def scale(self, workers: int) -> None:
        self.stack.operator.ScalePool(cp.ScalePoolRequest(pool=self.pool, workers=workers), timeout=5)

    def active(self, count: int) -> list[t.Worker]:
        """Waits for exactly `count` ACTIVE workers. Once this was in vain, later steps wait a moment only."""
        end = time.monotonic() + self._patience_s
        self._patience_s = 20.0
        while time.monotonic() < end:
            found = self.stack.workers("ACTIVE")
            if len(found) == count:
                self._patience_s = self.kit.start_s
                return found
            broken = [w for w in self.stack.workers() if w.phase == t.WORKER_PHASE_FAILED and w.attempts >= 2]
            assert not broken, f"{broken[0].reason}: {broken[0].message}\n{broken[0].exit.log_tail}"
            time.sleep(0.1)
        seen = [(w.worker_id, w.state, w.phase, w.reason) for w in self.stack.workers()]
        raise AssertionError(f"not {count} ACTIVE workers in time: {seen}")

    # ------------------------------------------------------------ looks

    def in_phase(self, phase: int) -> list[t.Worker]:
        return [worker for worker in self.stack.workers() if worker.phase == phase]

    def ledger(self, worker_id: str) -> dict[str, Any]:
        path = self.stack.folder / "agent" / "workers" / worker_id / "ledger.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    async def engine_get(self, worker_id: str, path: str) -> str:
        """Asks the engine itself, past shim and router."""
        return (await EngineHttp(str(self.ledger(worker_id)["engine_endpoint"])).get(path)).text()

    def tree(self, worker_id: str) -> list[psutil.Process]:
        """All processes of a worker's engine, its first one first."""
        guard = psutil.Process(self.stack.engine_pids(worker_id)["guard"])
        return guard.children(recursive=True)

    def rank_of(self, worker_id: str, gpu: int) -> psutil.Process:
        """The process that computes on a GPU: by NVML, else by its title, else the last that was started."""
        tree = self.tree(worker_id)
        on_gpu = set(self.devices.pids(gpu))
        by_title = [p for p in tree if f"TP{gpu}" in " ".join([p.name(), *p.cmdline()])]
        return next((p for p in tree if p.pid in on_gpu), (by_title or tree)[-1])

    def held_mib(self) -> list[int] | None:
        """Bytes above the idle host's, in MiB, by GPU. None: not measured."""
        if not self.devices.there:
            return None
        return [(used - idle) // MIB for used, idle in zip(self.devices.used_bytes(), self.idle_bytes, strict=True)]

    def wait_free(self, gpus: list[int], bound_s: float = 60.0) -> float | None:
        """Seconds until these GPUs hold nothing. None: not measured."""
        if not self.devices.there:
            return None
        began = time.monotonic()

        def free() -> bool:
            used = self.devices.used_bytes()
            return all(used[gpu] <= self.idle_bytes[gpu] + SLACK_BYTES for gpu in gpus)

        wait_for(f"free memory on GPUs {gpus}", free, bound_s)
        return round(time.monotonic() - began, 2)

    def start_spans(self, worker: t.Worker) -> dict[str, float]:
        """Measured phases of a start, seconds, as the worker's record has them."""
        found = getattr(worker, "start_phases_s", None)
        return {key: round(value, 2) for key, value in sorted(found.items())} if found else {}

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        self.stack.stop()

    def log_tails(self) -> dict[str, str]:
        """What to read when a step failed."""
        files = [*self.stack.folder.glob("*.log"), *self.stack.folder.glob("agent/workers/*/engine.log")]
        return {str(f.relative_to(self.stack.folder)): f.read_text(errors="replace")[-6000:] for f in sorted(files)}


def host_facts() -> dict[str, object]:
    """Of the machine, without its name."""
    return {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
    }
