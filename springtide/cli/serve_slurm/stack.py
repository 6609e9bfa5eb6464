"""Control plane, router and SLURM provisioner as one. Its jobs outlive it unless it is told to release them."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from springtide.cli import text
from springtide.cli.exits import Exit
from springtide.cli.processes import module_command
from springtide.cli.serve_slurm import configs
from springtide.cli.serve_slurm.options import ServePlan, spec
from springtide.cli.up.child import Child, child_environment
from springtide.cli.up.options import check_ports
from springtide.cli.up.screen import Screen
from springtide.cli.up.stack import LISTEN_TIMEOUT_S, POLL_S, STOP_TIMEOUT_S, Stack
from springtide.client.asynchronous import AsyncSpringtide
from springtide.discovery import write_discovery
from springtide.errors import SpringtideError
from springtide.v1 import types_pb2 as t

DISCOVERY = "serve-slurm.json"
RELEASE_TIMEOUT_S = 60.0


class SlurmStack(Stack):
    """One run, as `Stack` is one of `springtide up`. `release`: the end cancels all jobs of this provisioner."""

    def __init__(self, plan: ServePlan, screen: Screen, *, release: bool) -> None:
        super().__init__(plan, screen)
        self.serve_plan = plan
        self._release = release
        o = plan.serve
        self.ports = dataclasses.replace(self.ports, host=o.own_host)
        folder = self.data_dir
        processes = (("control plane", "controlplane"), ("router", "router"), ("provisioner", "provisioner"))
        self._children = {
            name: Child(
                name,
                module,
                config=folder / "config" / f"{module}.toml",
                discovery=folder / module / f"{module}.json",
                log_path=folder / "logs" / f"{module}.log",
                cwd=folder,
            )
            for name, module in processes
        }

    # ------------------------------------------------------------ up

    async def serve(self) -> None:
        """Starts everything, then keeps it up. Raises SpringtideError when the start fails."""
        began = time.monotonic()
        o = self.serve_plan.serve
        self.screen.say(f"Springtide on SLURM: {o.model} with {o.engine}, data in {self.data_dir}")
        for line in table(o.gpus_per_node, o.max_nodes, o.tensor_parallel_size):
            self.screen.say("  " + line)
        check_ports(self.serve_plan.options)
        await self._start("control plane")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start("router"))
            group.create_task(self._start("provisioner"))
        self._advertise()
        async with asyncio.TaskGroup() as group:
            for child in self._children.values():
                group.create_task(child.keep(self._note, LISTEN_TIMEOUT_S))
            group.create_task(self._serve_pool(began))

    def _write_configs(self) -> None:
        for module, content in configs.all_of(self.serve_plan, self.ports).items():
            path = self.data_dir / "config" / f"{module}.toml"
            partial = path.with_suffix(".tmp")
            partial.touch(mode=0o600)
            partial.write_text(content)
            partial.replace(path)

    def _advertise(self) -> None:
        """Where it is: JSON for our own commands, and one line for scripts."""
        o = self.serve_plan.serve
        url = f"http{'s' if o.tls_cert else ''}://{o.reached_host}:{self.ports.http}"
        found = {
            "pid": os.getpid(),
            "url": url,
            "controlplane": self.ports.controlplane_address,
            "router": self.ports.router_address,
            "pool": self.serve_plan.options.pool,
            "max_nodes": o.max_nodes,
            "workers_per_node": o.workers_per_node,
            "greedy": o.policy == "greedy",
            "target_file": str(configs.target_file(self.data_dir)),
        }
        write_discovery(self.data_dir / DISCOVERY, found)
        for path in self._address_files():
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            partial.write_text(url + "\n")
            partial.replace(path)

    def _address_files(self) -> list[Path]:
        given = self.serve_plan.serve.advertise_file
        return [self.data_dir / "scheduler_url", *([Path(given).expanduser().absolute()] if given else [])]

    async def _apply(self, client: AsyncSpringtide) -> None:
        o = self.serve_plan.serve
        _, created = await client.apply(spec(o, _target(self.data_dir, o.max_nodes)))
        bounds = f"{o.min_workers} to {o.most_workers()} workers on at most {o.max_nodes} nodes"
        self.screen.say(f"  pool {self.serve_plan.options.pool}: {'created' if created else 'kept'}: {bounds}")

    async def _wait_for_worker(self, client: AsyncSpringtide) -> None:
        """Says how nodes and workers come up, until the router has one to route to."""
        began, shown = time.monotonic(), dict[str, str]()
        o, pool = self.serve_plan.serve, self.serve_plan.options.pool
        url = f"http{'s' if o.tls_cert else ''}://{o.reached_host}:{self.ports.http}"
        self.screen.say(f"  OpenAI API     {url}/v1   (its address is in {self.data_dir / 'scheduler_url'})")
        while True:
            try:
                nodes, workers = await client.nodes(), await client.workers(pool=pool)
                routable = sum(model.active_workers for model in await client.models() if model.pool == pool)
            except SpringtideError as error:  # a process that is being started again
                self.screen.live(f"  {error.message}")
                await asyncio.sleep(POLL_S)
                continue
            for name, line in [*_node_lines(nodes), *_worker_lines(workers)]:
                if shown.get(name) != line:
                    shown[name] = line
                    self.screen.say(f"  {name:<24} {text.coloured(line)}")
            if routable:
                self.screen.live("")
                return
            waited = text.duration(time.monotonic() - began)
            self.screen.live(f"  waiting for SLURM and the first worker, {waited}")
            await asyncio.sleep(POLL_S)

    # ------------------------------------------------------------ down

    async def stop(self) -> Exit:
        """Router and provisioner end, then (if so told) all jobs, then the control plane."""
        self.screen.live("")
        for child in self._children.values():
            child.stopping = True
        if any(child.alive for child in self._children.values()):
            self.screen.say("Stopping: running requests finish. Ctrl-C again stops at once.")
        deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        await self._end([self._children["router"], self._children["provisioner"]], deadline)
        clean = await self._release_jobs() if self._release else True
        if not self._release:
            self.screen.say("Jobs stay in SLURM; the same command finds them again (--release-on-exit cancels them).")
        await self._end([self._children["control plane"]], deadline + RELEASE_TIMEOUT_S)
        for path in (self.data_dir / DISCOVERY, *self._address_files()):
            path.unlink(missing_ok=True)
        self.screen.say("Stopped.")
        return Exit.OK if clean else Exit.REFUSED

    async def _release_jobs(self) -> bool:
        """scancel of every job that this provisioner has, and their ends."""
        config = self.data_dir / "config" / "provisioner.toml"
        if not config.exists():
            return True
        process = await asyncio.create_subprocess_exec(
            *module_command("provisioner.slurm"),
            *("cancel", "--config", str(config), "--timeout-s", str(RELEASE_TIMEOUT_S)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S + 30):
                said, _ = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            said = b"the jobs did not end in time"
        for line in said.decode(errors="replace").splitlines():
            self.screen.say(click.style(f"  {line}", fg=None if process.returncode == 0 else "red"))
        return process.returncode == 0


def _target(data_dir: Path, max_nodes: int) -> int:
    try:
        return max(0, min(max_nodes, int(configs.target_file(data_dir).read_text())))
    except (OSError, ValueError):
        return max_nodes


def _node_lines(nodes: list[t.Node]) -> list[tuple[str, str]]:
    return [
        (node.node_id, "  ".join(filter(None, (t.NodeState.Name(node.state).removeprefix("NODE_STATE_"), node.reason))))
        for node in nodes
    ]


def _worker_lines(workers: list[t.Worker]) -> list[tuple[str, str]]:
    from springtide.cli.views import state_of

    return [(worker.worker_id, "  ".join(filter(None, (state_of(worker), worker.message)))) for worker in workers]


def table(gpus_per_node: int, max_nodes: int, chosen: int) -> list[str]:
    """Workers by tensor-parallel size; the chosen one is marked."""
    lines = [f"TP  workers/node  workers on {max_nodes} nodes"]
    size = 1
    while size <= gpus_per_node:
        if gpus_per_node % size == 0:
            each = gpus_per_node // size
            mark = "  <-" if size == chosen else ""
            lines.append(f"{size:<3} {each:<13} {each * max_nodes}{mark}")
        size *= 2
    if chosen & (chosen - 1):
        each = gpus_per_node // chosen
        lines.append(f"{chosen:<3} {each:<13} {each * max_nodes}  <-")
    return lines


def read_discovery(data_dir: Path) -> dict[str, Any] | None:
    """What a running `serve-slurm` of this folder wrote; None when there is none."""
    try:
        found = json.loads((data_dir / DISCOVERY).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
