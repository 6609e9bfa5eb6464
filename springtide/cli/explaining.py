"""Commands that say why: explain (a recorded decision) and preview (one that would be made now)."""

from collections.abc import Sequence

import click

from springtide.cli import views
from springtide.cli.invocation import Invocation, command
from springtide.cli.shape import plain
from springtide.errors import InvalidArgument
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1.types_pb2 import Decision


@click.command()
@click.argument("what", metavar="POOL|DECISION")
@command
async def explain(invocation: Invocation, what: str) -> None:
    """Say why a decision was made: a pool's newest one, or the one with that id (`springtide --json decisions`)."""
    found = (
        await invocation.client.explain(int(what)) if what.isdecimal() else await invocation.client.explain(pool=what)
    )
    invocation.show(plain(found), told(found.decision, found.explanation))


@click.command()
@click.argument("pool")
@click.option("--policy", default="", help="As if the pool had this policy.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of it; repeatable.")
@click.option("--min", "min_workers", type=int, default=None, help="As if this were its min_workers.")
@click.option("--max", "max_workers", type=int, default=None, help="As if this were its max_workers.")
@click.option("--waiting", type=int, default=None, help="As if so many requests had been waiting for a while.")
@command
async def preview(
    invocation: Invocation,
    pool: str,
    policy: str,
    settings: Sequence[str],
    min_workers: int | None,
    max_workers: int | None,
    waiting: int | None,
) -> None:
    """Say what a pool's policy would decide now, and what would happen at once. Nothing is changed."""
    found = await invocation.client.preview(
        pool,
        policy=policy,
        settings=dict(_setting(text) for text in settings),
        min_workers=min_workers,
        max_workers=max_workers,
        waiting=waiting,
    )
    text = told(found.decision, found.explanation)
    happens = [f"  {event.action} {event.target} ({event.reason})" for event in found.events]
    text += _block("Would happen", happens) + _block("Conditions", [f"  {line}" for line in found.conditions])
    invocation.show(plain(found), text)


def told(decision: Decision, explanation: cp.Explanation) -> str:
    """The decision, then what it saw, the steps, the settings and the hints."""
    return (
        views.decisions([decision])
        + _block("Steps", [f"  {line}" for line in explanation.steps])
        + _block("Seen", [f"  {line}" for line in explanation.seen])
        + _block("Settings", [f"  {line}" for line in explanation.settings])
        + _block("To change it", [f"  {line}" for line in explanation.hints])
    )


def _block(title: str, lines: list[str]) -> str:
    return "\n\n" + click.style(title, bold=True) + "\n" + "\n".join(lines) if lines else ""


def _setting(text: str) -> tuple[str, str | float | int | bool]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidArgument(
            field="--set", value=text, problem="is no KEY=VALUE", remedy="E.g. --set attainment=0.95."
        )
    if value in ("true", "false"):
        return key, value == "true"
    try:
        number = float(value)
    except ValueError:
        return key, value
    return key, int(number) if number.is_integer() else number
