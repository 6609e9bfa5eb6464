"""`springtide slurm`: what can be changed while `serve-slurm` runs."""

from pathlib import Path
from typing import Any

import click

from springtide.cli.exits import Exit
from springtide.cli.invocation import Invocation, command
from springtide.cli.serve_slurm.options import default_data_dir
from springtide.cli.serve_slurm.stack import read_discovery
from springtide.errors import FailedPrecondition, NotFound
from springtide.v1 import types_pb2 as t

_DATA_DIR = click.option(
    "--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Of serve-slurm. [its default]"
)


@click.group("slurm")
def slurm() -> None:
    """Change a running `springtide serve-slurm`: its number of nodes, one worker less."""


@slurm.command("target")
@click.argument("nodes", type=click.IntRange(min=0))
@_DATA_DIR
@command
async def target(invocation: Invocation, nodes: int, data_dir: Path | None) -> int:
    """Have NODES nodes from now on, at most its --max-nodes.

    More are acquired at once; fewer: workers drain, and then their jobs end.
    """
    found = _running(data_dir)
    async with _client(found) as client:
        now = min(nodes, int(found["max_nodes"]))
        leaving = await _surplus(client, found, now)
        await _change(client, found, leaving, now, now * int(found["workers_per_node"]))
    invocation.show(
        {"nodes": now, "workers": now * found["workers_per_node"]},
        f"Target: {now} nodes, {now * found['workers_per_node']} workers.",
    )
    return Exit.OK


@slurm.command("cancel-worker")
@click.argument("worker_id")
@_DATA_DIR
@command
async def cancel_worker(invocation: Invocation, worker_id: str, data_dir: Path | None) -> int:
    """Drain one worker for good: the target is lowered by it, and by its node when it is the node's last."""
    found = _running(data_dir)
    pool = found["pool"]
    async with _client(found) as client:
        workers = [worker for worker in await client.workers(pool=pool) if worker.state != t.WORKER_STATE_INACTIVE]
        mine = next((worker for worker in workers if worker.worker_id == worker_id), None)
        if mine is None:
            raise NotFound(kind="worker", name=worker_id, known=[worker.worker_id for worker in workers])
        others = [worker for worker in workers if worker.node_id == mine.node_id and worker is not mine]
        node = next((node for node in await client.nodes() if node.node_id == mine.node_id), None)
        nodes = _target(found) - (0 if others else 1)
        policy = (await client.pool(pool)).spec.policy
        wanted = int(policy.settings["workers"]) if "workers" in policy.settings else len(workers)
        await _change(client, found, [worker_id], nodes, max(0, wanted - 1))
    result = {
        "deregistered": worker_id,
        "slurm_job_id": node.reference if node is not None else "",
        "job_ends": not others,
        "remaining_workers": len(workers) - 1,
    }
    ends = f"; job {result['slurm_job_id']} ends with it" if not others else ""
    invocation.show(result, f"{worker_id} drains{ends}. {len(workers) - 1} workers remain.")
    return Exit.OK


async def _surplus(client: Any, found: dict[str, Any], nodes: int) -> list[str]:
    """Workers of the nodes that leave: whole nodes, those with the least to do. Left to itself a pool would take
    workers from everywhere, and no node would become empty."""
    up = {node.node_id for node in await client.nodes() if node.state == t.NODE_STATE_UP}
    load = dict.fromkeys(up, 0)
    active: dict[str, list[str]] = {node_id: [] for node_id in up}
    for worker in await client.workers(pool=found["pool"]):
        if worker.node_id in up and worker.state == t.WORKER_STATE_ACTIVE:
            load[worker.node_id] += worker.in_flight
            active[worker.node_id].append(worker.worker_id)
    leaving = sorted(up, key=lambda node_id: (len(active[node_id]), load[node_id], node_id))[: max(0, len(up) - nodes)]
    return [worker_id for node_id in leaving for worker_id in active[node_id]]


async def _change(client: Any, found: dict[str, Any], leaving: list[str], nodes: int, workers: int) -> None:
    """Drains these workers and wants fewer; nothing is replaced between the two."""
    if not leaving:
        await _set(client, found, nodes, workers)
        return
    await client.pause(found["pool"], reason="TARGET_LOWERED")
    try:
        for worker_id in leaving:
            await client.drain(worker_id, reason="TARGET_LOWERED")
        await _set(client, found, nodes, workers)
    finally:
        await client.resume(found["pool"])


async def _set(client: Any, found: dict[str, Any], nodes: int, workers: int) -> None:
    """The file is what the provisioner offers, the pool what is asked for."""
    path = Path(found["target_file"])
    partial = path.with_name(f".{path.name}.new")
    partial.write_text(f"{nodes}\n")
    partial.replace(path)
    spec = (await client.pool(found["pool"])).spec
    spec.policy.settings["workers"] = workers
    spec.min_workers = min(spec.min_workers, workers)
    await client.apply(spec)


def _target(found: dict[str, Any]) -> int:
    try:
        return int(Path(found["target_file"]).read_text())
    except (OSError, ValueError):
        return int(found["max_nodes"])


def _running(data_dir: Path | None) -> dict[str, Any]:
    folder = (data_dir or default_data_dir()).expanduser().absolute()
    found = read_discovery(folder)
    if found is None:
        raise NotFound(kind="serve-slurm", name=str(folder))
    if not found["greedy"]:
        raise FailedPrecondition(
            "its nodes follow the pool's policy.",
            reason="NOT_GREEDY",
            remedy="Use `springtide scale`, or `springtide apply` with other bounds.",
        )
    return found


def _client(found: dict[str, Any]) -> Any:
    from springtide.client.asynchronous import AsyncSpringtide

    return AsyncSpringtide(found["controlplane"], found["router"])
