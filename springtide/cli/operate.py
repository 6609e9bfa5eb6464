"""Commands that change what is wanted of pools, workers and nodes: from scale to notice."""

from typing import Any

import click

from springtide.cli import text, views, waiting
from springtide.cli.invocation import Duration, Invocation, command
from springtide.cli.shape import plain
from springtide.v1.types_pb2 import Node, Pool, Worker

wait_option = click.option("--wait", is_flag=True, help="Return when it is done, with progress on stderr.")
bound_option = click.option(
    "--timeout", "bound_s", type=Duration(), default=waiting.DEFAULT_TIMEOUT_S, help="For --wait: exit 6 after so long."
)
reason_option = click.option("--reason", default="", help="Kept with the record.")


class Count(click.ParamType[int | None]):
    """A number of workers, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto":
            return None
        if not str(value).isdigit():
            self.fail(f"{value!r} is neither a number of workers nor `auto`.", param, ctx)
        return int(value)


@click.command()
@click.argument("pool")
@click.argument("workers", type=Count(), metavar="N|auto")
@wait_option
@bound_option
@command
async def scale(invocation: Invocation, pool: str, workers: int | None, wait: bool, bound_s: float) -> None:
    """Pin POOL at N workers, within its bounds; `auto` gives it back to the policy."""
    if wait and workers is None:
        raise click.UsageError("--wait needs a number: nobody knows where the policy will go.")
    changed = await invocation.client.scale(pool, workers)
    if wait and workers is not None:
        changed = await waiting.pool_at(invocation, pool, workers, bound_s)
    how = "follows its policy" if workers is None else f"is pinned at {workers}"
    _show_pool(invocation, changed, how)


@click.command()
@click.argument("pool")
@click.option("--for", "hold_s", type=Duration(), default=600.0, help="How long; 10m unless given, at most 24h.")
@reason_option
@command
async def pause(invocation: Invocation, pool: str, hold_s: float, reason: str) -> None:
    """Hold scaling of POOL until the hold expires. Failed workers are still replaced."""
    paused = await invocation.client.pause(pool, hold_s=hold_s, reason=reason)
    _show_pool(invocation, paused, f"is not scaled for {text.duration(hold_s)}")


@click.command()
@click.argument("pool")
@command
async def resume(invocation: Invocation, pool: str) -> None:
    """End POOL's hold."""
    _show_pool(invocation, await invocation.client.resume(pool), "is scaled again")


@click.command()
@click.argument("worker_id")
@click.option(
    "--finish-within", "drain_s", type=Duration(), default=None, help="For running requests; else the pool's."
)
@reason_option
@wait_option
@bound_option
@command
async def drain(
    invocation: Invocation, worker_id: str, drain_s: float | None, reason: str, wait: bool, bound_s: float
) -> None:
    """Let WORKER_ID finish what it runs, and stop it. Scaling does not start it again."""
    worker = await invocation.client.drain(worker_id, timeout_s=drain_s, reason=reason)
    if wait:
        worker = await waiting.worker_in(invocation, worker_id, "INACTIVE", never="ACTIVE", timeout_s=bound_s)
    _show_worker(invocation, worker)


@click.command()
@click.argument("worker_id")
@command
async def undrain(invocation: Invocation, worker_id: str) -> None:
    """Cancel a drain: WORKER_ID serves again. Refused once its engine is being stopped."""
    _show_worker(invocation, await invocation.client.undrain(worker_id))


@click.command()
@click.argument("worker_id")
@wait_option
@bound_option
@command
async def activate(invocation: Invocation, worker_id: str, wait: bool, bound_s: float) -> None:
    """Start an inactive worker, also one whose start attempts ran out."""
    worker = await invocation.client.activate(worker_id)
    if wait:
        worker = await waiting.worker_in(invocation, worker_id, "ACTIVE", never="DRAINING", timeout_s=bound_s)
    _show_worker(invocation, worker)


@click.command()
@click.argument("worker_id")
@command
async def cancel(invocation: Invocation, worker_id: str) -> None:
    """Cancel the start of WORKER_ID."""
    _show_worker(invocation, await invocation.client.cancel(worker_id))


@click.command()
@click.argument("node_id")
@reason_option
@command
async def cordon(invocation: Invocation, node_id: str, reason: str) -> None:
    """Place no new worker on NODE_ID. Its workers go on."""
    _show_node(invocation, await invocation.client.cordon(node_id, reason=reason), "takes no new workers")


@click.command()
@click.argument("node_id")
@command
async def uncordon(invocation: Invocation, node_id: str) -> None:
    """Place workers on NODE_ID again."""
    _show_node(invocation, await invocation.client.uncordon(node_id), "takes new workers")


@click.command()
@click.argument("node_id")
@click.option("--in", "in_s", type=Duration(), default=0.0, help="Time until it is gone, e.g. 120s. Default: at once.")
@click.option("--withdraw", is_flag=True, help="It stays after all.")
@command
async def notice(invocation: Invocation, node_id: str, in_s: float, withdraw: bool) -> None:
    """Say that NODE_ID is taken away: its workers are replaced elsewhere and drained before."""
    node = await invocation.client.notice(node_id, in_s=in_s, withdraw=withdraw)
    how = "stays" if withdraw else f"is taken away in {text.duration(in_s)}; its workers leave"
    _show_node(invocation, node, how)


def _show_pool(invocation: Invocation, pool: Pool, how: str) -> None:
    counts = f"{pool.status.active} active, {pool.status.starting} starting, {pool.status.draining} draining"
    invocation.show(plain(pool), f"pool {pool.spec.name} {how}: desired {pool.status.desired_workers}, {counts}")


def _show_worker(invocation: Invocation, worker: Worker) -> None:
    words = f"worker {worker.worker_id} {views.state_of(worker)} {worker.reason}".strip()
    invocation.show(plain(worker), words)


def _show_node(invocation: Invocation, node: Node, how: str) -> None:
    invocation.show(plain(node), f"node {node.node_id} {how}")
