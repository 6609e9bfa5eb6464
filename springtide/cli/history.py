"""Commands that show what was decided and what happened: decisions, events."""

import csv
import io
import json
from collections.abc import Sequence

import click

from springtide.cli import text, views
from springtide.cli.invocation import Invocation, command
from springtide.cli.shape import dump, plain
from springtide.v1.types_pb2 import Event

CSV_HEADER = ("time", "action", "target", "status")


@click.command()
@click.option("--pool", default="", help="Only of this pool.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--skip-holds", is_flag=True, help="Leave out decisions that changed nothing.")
@command
async def decisions(invocation: Invocation, pool: str, limit: int, skip_holds: bool) -> None:
    """Show scaling decisions, newest first, each with the numbers that it rests on."""
    found = await invocation.client.decisions(pool=pool, limit=limit, skip_holds=skip_holds)
    invocation.show([plain(decision) for decision in found], views.decisions(found))


@click.command()
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--pool", default="", help="Only of this pool.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The newest so many.")
@click.option("--after", "after_event_id", type=click.IntRange(min=0), default=0, help="Only events after this id.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@command
async def events(invocation: Invocation, form: str, pool: str, limit: int, after_event_id: int, follow: bool) -> None:
    """Show what happened, oldest first.

    --format csv has the columns time,action,target,status; time is seconds since the epoch.
    """
    form = "json" if invocation.as_json else form
    found = await invocation.client.events(pool=pool, limit=limit, after_event_id=after_event_id)
    if form == "csv":
        click.echo(csv_line(CSV_HEADER))
        for event in found:
            click.echo(csv_line(views.event_csv_row(event)))
    elif form == "json" and not follow:
        click.echo(dump([plain(event) for event in found]))
    elif form == "table":
        click.echo(views.events(found))
    else:
        for event in found:
            _echo_one(event, form)
    if follow:
        newest = found[-1].event_id if found else after_event_id or None
        async for event in invocation.client.watch_events(pool=pool, after_event_id=newest):
            _echo_one(event, form)


def _echo_one(event: Event, form: str) -> None:
    """One event of a stream: a CSV line, a JSON object per line, or words."""
    if form == "csv":
        click.echo(csv_line(views.event_csv_row(event)))
    elif form == "json":
        click.echo(json.dumps(plain(event)))
    else:
        click.echo("  ".join(text.coloured(cell) for cell in views.event_row(event) if cell))


def csv_line(row: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(row)
    return out.getvalue()
