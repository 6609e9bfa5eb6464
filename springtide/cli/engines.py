"""Commands for engines: sleep, lend, reclaim, engine, worker-verb, weights."""

import json

import click

from springtide.cli import views, waiting
from springtide.cli.invocation import Duration, Invocation, command
from springtide.cli.operate import bound_option, reason_option, wait_option
from springtide.cli.shape import plain
from springtide.errors import InvalidArgument
from springtide.v1.types_pb2 import Pool, Worker

_VERBS = {
    "ready": ("ready", ""),
    "load": ("load", ""),
    "capabilities": ("capabilities", ""),
    "weight-version": ("weight_version", ""),
    "flush-cache": ("flush_cache", ""),
    "abort": ("abort", "id"),
    "abort-all": ("abort_all", ""),
    "wait-idle": ("wait_idle", ""),
    "warm-up": ("warm_up", "model"),
    "pause": ("pause", "mode"),
    "resume": ("resume", ""),
    "profile": ("profile", "action"),
}
"""Command word to the verb and to the argument that VALUE is."""

timeout_option = click.option(
    "--timeout", "timeout_s", type=Duration(), default=30.0, help="For the engine's answer; 30s unless given."
)


@click.command()
@click.argument("worker_id")
@click.option(
    "--finish-within", "drain_s", type=Duration(), default=None, help="For running requests; else the pool's."
)
@reason_option
@wait_option
@bound_option
@command
async def sleep(
    invocation: Invocation, worker_id: str, drain_s: float | None, reason: str, wait: bool, bound_s: float
) -> None:
    """Let WORKER_ID finish what it runs, and release its memory. Scaling does not wake it; `wake` does."""
    worker = await invocation.client.sleep(worker_id, timeout_s=drain_s, reason=reason)
    if wait:
        worker = await waiting.worker_in(invocation, worker_id, "INACTIVE", never="ACTIVE", timeout_s=bound_s)
    _show_worker(invocation, worker)


@click.command()
@click.argument("worker_id")
@click.option("--to", "to", required=True, help="Who gets the GPUs.")
@command
async def lend(invocation: Invocation, worker_id: str, to: str) -> None:
    """Lend the GPUs of the sleeping WORKER_ID to a job outside; prints node and GPUs."""
    worker = await invocation.client.lend(worker_id, to)
    words = f"node {worker.node_id} GPUs {','.join(worker.gpu_ids)} are lent to {worker.lent_to} until `reclaim`"
    invocation.show(plain(worker), words)


@click.command()
@click.argument("worker_id")
@command
async def reclaim(invocation: Invocation, worker_id: str) -> None:
    """End the loan of WORKER_ID's GPUs. Before it wakes, its node waits until their memory is free."""
    _show_worker(invocation, await invocation.client.reclaim(worker_id))


@click.command()
@click.argument("worker_id")
@click.argument("verb", type=click.Choice([*_VERBS, "release", "restore"]))
@click.argument("value", default="")
@timeout_option
@command
async def engine(invocation: Invocation, worker_id: str, verb: str, value: str, timeout_s: float) -> None:
    """One verb at the engine of WORKER_ID.

    \b
    abort [ID]            one request, or all of them
    pause [MODE]          abort, wait or keep (default) what runs; recorded until `resume`
    profile start|stop    the engine's profiler
    warm-up [MODEL]       one generated token
    release, restore      the same as `sleep` and `wake`
    """
    client = invocation.client
    if verb in ("release", "restore"):
        worker = await (client.sleep(worker_id) if verb == "release" else client.activate(worker_id))
        _show_worker(invocation, worker)
        return
    name, argument = _VERBS[verb]
    if value and not argument:
        raise click.UsageError(f"{verb} takes no value.")
    if name == "abort" and not value:
        name, argument = "abort_all", ""
    args = {argument: value} if value else {}
    _show_answer(invocation, verb, worker_id, await client.verb(worker_id, name, args, timeout_s=timeout_s))


@click.command("worker-verb")
@click.argument("worker_id")
@click.argument("verb")
@click.argument("args", nargs=-1, metavar="[KEY=VALUE]...")
@timeout_option
@command
async def worker_verb(
    invocation: Invocation, worker_id: str, verb: str, args: tuple[str, ...], timeout_s: float
) -> None:
    """Send VERB with arguments to the engine of WORKER_ID, as the agent names them: flush_cache, abort id=..., ..."""
    given: dict[str, str] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise InvalidArgument(field="args", value=arg, problem="is no KEY=VALUE", remedy="E.g. mode=keep.")
        given[key] = value
    answer = await invocation.client.verb(worker_id, verb.replace("-", "_"), given, timeout_s=timeout_s)
    _show_answer(invocation, verb, worker_id, answer)


@click.command()
@click.argument("pool")
@click.option("--version", "version", required=True, help="Label of the weights.")
@click.option("--source", "source", required=True, help="Folder that the engines can read.")
@click.option("--barrier", is_flag=True, help="Workers that are behind serve nothing from now on.")
@wait_option
@bound_option
@command
async def weights(
    invocation: Invocation, pool: str, version: str, source: str, barrier: bool, wait: bool, bound_s: float
) -> None:
    """Let POOL serve the weights VERSION from the folder SOURCE.

    One worker after the other changes; new ones join with them only.
    """
    changed = await invocation.client.set_weights(pool, version, source, barrier=barrier)
    if wait:

        def shown(found: Pool) -> str:
            status = found.status
            return "; ".join(
                [f"{status.weights_behind} of {status.active} active workers are behind", *status.conditions]
            )

        changed = await waiting.until(
            invocation,
            lambda: invocation.client.pool(pool),
            reached=lambda found: found.status.active > 0 and not found.status.weights_behind,
            shown=shown,
            timeout_s=bound_s,
            target=f"Version {version} on every active worker of {pool}",
        )
    behind = changed.status.weights_behind
    invocation.show(plain(changed), f"pool {pool} serves {version}; {behind} of its active workers are behind")


def _show_worker(invocation: Invocation, worker: Worker) -> None:
    words = f"worker {worker.worker_id} {views.state_of(worker)} {worker.reason}".strip()
    invocation.show(plain(worker), words)


def _show_answer(invocation: Invocation, verb: str, worker_id: str, answer: dict[str, object]) -> None:
    told = ", ".join(f"{key} {json.dumps(value)}" for key, value in answer.items()) or "done"
    invocation.show(answer, f"{worker_id} {verb}: {told}")
