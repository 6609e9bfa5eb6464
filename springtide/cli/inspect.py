"""Commands that only look: status, pools, workers, nodes, models, health, version."""

from typing import Any

import click

from springtide.cli import text, views
from springtide.cli.exits import Exit
from springtide.cli.invocation import Invocation, command, repeat
from springtide.cli.shape import dump, plain
from springtide.client.cluster import cluster_status

watch_option = click.option("--watch", "-w", is_flag=True, help="Redraw until Ctrl-C.")
interval_option = click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds, for --watch.",
)


@click.command()
@click.option("--summary", is_flag=True, help="Only the eight counts of workers and nodes.")
@click.option("--metrics", is_flag=True, help="Only the seven figures of load and capacity.")
@click.option("--pool", default="", help="For --metrics and --shape: of this pool instead of all.")
@click.option(
    "--shape",
    type=click.Choice(["full", "cluster"]),
    default="full",
    help="For --json: `cluster` is the shape of /cluster_status, of one pool.",
)
@watch_option
@interval_option
@command
async def status(
    invocation: Invocation, summary: bool, metrics: bool, pool: str, shape: str, watch: bool, interval_s: float
) -> None:
    """Pools, workers, nodes and routers at one revision.

    A dash in a table means unknown, never zero.
    """
    if summary or metrics:
        client = invocation.client
        answer: Any = await client.summary() if summary else await client.metrics(pool=pool)
        values = plain(answer)
        shown = ((k, text.UNKNOWN if v is None else v) for k, v in values.items())
        invocation.show(values, text.pairs(shown))
    elif shape == "cluster":
        shaped = cluster_status(await invocation.client.status(), pool)
        invocation.show(shaped, dump(shaped))
    elif watch and not invocation.as_json:

        async def render() -> str:
            return views.status(await invocation.client.status())

        await repeat(interval_s, render)
    else:
        everything = await invocation.client.status()
        invocation.show(plain(everything), views.status(everything))


@click.command()
@click.argument("name", default="")
@command
async def pools(invocation: Invocation, name: str) -> None:
    """List pools, or show the pool NAME."""
    if name:
        pool = await invocation.client.pool(name)
        invocation.show(plain(pool), views.pool_page(pool))
    else:
        found = await invocation.client.pools()
        invocation.show([plain(pool) for pool in found], views.pools(found))


@click.command()
@click.argument("worker_id", default="")
@click.option("--pool", default="", help="Only workers of this pool.")
@click.option("--node", default="", help="Only workers on this node.")
@click.option("--sort", type=click.Choice(list(views.SORTS)), default="id", show_default=True)
@click.option(
    "--output", "-o", type=click.Choice(["table", "wide"]), default="table", help="wide: with the phases of its start."
)
@watch_option
@interval_option
@command
async def workers(
    invocation: Invocation, worker_id: str, pool: str, node: str, sort: str, output: str, watch: bool, interval_s: float
) -> None:
    """List workers, or show the worker WORKER_ID with the end of its log."""

    async def render() -> str:
        return views.workers(await invocation.client.workers(pool=pool, node=node), sort=sort, wide=output == "wide")

    if worker_id:
        worker = await invocation.client.worker(worker_id)
        invocation.show(plain(worker), views.worker_page(worker))
    elif watch and not invocation.as_json:
        await repeat(interval_s, render)
    else:
        found = sorted(await invocation.client.workers(pool=pool, node=node), key=views.SORTS[sort])
        shown = views.workers(found, sort=sort, wide=output == "wide")
        invocation.show([plain(worker) for worker in found], shown)


@click.command()
@command
async def nodes(invocation: Invocation) -> None:
    """List nodes."""
    found = await invocation.client.nodes()
    invocation.show([plain(node) for node in found], views.nodes(found))


@click.command()
@command
async def provisioners(invocation: Invocation) -> None:
    """List who gives nodes, and how many of each capability set."""
    found = await invocation.client.provisioners()
    invocation.show([plain(provisioner) for provisioner in found], views.provisioners(found))


@click.command()
@command
async def models(invocation: Invocation) -> None:
    """List the models that the router serves."""
    found = await invocation.client.models()
    invocation.show([plain(model) for model in found], views.models(found))


@click.command()
@command
async def health(invocation: Invocation) -> int:
    """Ask control plane, router and every pool whether they serve.

    Exit code 0: all do; 1: one does not; 3: the control plane or the router does not answer.
    """
    client = invocation.client
    checks = [
        ("control plane", client.address, await client.health()),
        ("router", client.router, await client.health(router=True)),
    ]
    for pool in await client.pools():
        enough = pool.status.active >= min(1, pool.spec.min_workers)
        verdict = "SERVING" if enough else "NOT_SERVING"
        checks.append(
            (f"pool {pool.spec.name}", f"{pool.status.active} active of {pool.status.desired_workers}", verdict)
        )
    rows = [{"what": what, "where": where, "health": verdict} for what, where, verdict in checks]
    invocation.show(rows, text.table(("WHAT", "WHERE", "HEALTH"), checks))
    return Exit.OK if all(verdict == "SERVING" for _, _, verdict in checks) else Exit.REFUSED


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
@click.pass_context
def version(ctx: click.Context, as_json: bool) -> None:
    """Show the version."""
    import platform

    from springtide import __version__
    from springtide.cli.shape import dump

    if as_json or (ctx.obj or {}).get("as_json"):
        click.echo(dump({"version": __version__, "python": platform.python_version()}))
    else:
        click.echo(f"springtide {__version__} (Python {platform.python_version()})")
