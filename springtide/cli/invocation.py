"""What every command that talks to a process shares: addresses, output, and errors as exit codes."""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import click

from springtide.cli.exits import Exit, exit_code, show_error
from springtide.cli.shape import dump
from springtide.errors import InvalidArgument, SpringtideError

T = TypeVar("T")


class Invocation:
    """One call of the command line."""

    def __init__(self, address: str | None, router: str | None, as_json: bool) -> None:
        from springtide.client.asynchronous import AsyncSpringtide

        self.as_json = as_json
        self.client = AsyncSpringtide(address, router)

    def show(self, value: Any, text: str) -> None:
        """The answer: `value` as JSON, or `text` for people."""
        click.echo(dump(value) if self.as_json else text)

    def progress(self, line: str) -> None:
        """One line of progress, on stderr and only for people."""
        if not self.as_json:
            click.echo(line, err=True)


def command(function: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """A click callback of a coroutine function that takes the invocation first.

    Adds --address, --router and --json, which may also stand before the command. The coroutine's int is the exit code.
    """

    @functools.wraps(function)
    def callback(address: str | None, router: str | None, as_json: bool, **arguments: Any) -> None:
        outer: dict[str, Any] = click.get_current_context().obj or {}
        as_json = as_json or bool(outer.get("as_json"))
        arguments_given = (address or outer.get("address"), router or outer.get("router"), as_json)
        sys.exit(run_to_exit(lambda: _call(function, arguments_given, arguments), as_json=as_json))

    for option in reversed(_OPTIONS):
        callback = option(callback)
    return callback


_OPTIONS = (
    click.option("--address", metavar="HOST:PORT", callback=lambda c, p, v: _address(p, v), help="Control plane."),
    click.option("--router", metavar="HOST:PORT", callback=lambda c, p, v: _address(p, v), help="Router, gRPC."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts."),
)


async def _call(
    function: Callable[..., Coroutine[Any, Any, int | None]],
    given: tuple[str | None, str | None, bool],
    arguments: dict[str, Any],
) -> int:
    invocation = Invocation(*given)
    async with invocation.client:
        return await function(invocation, **arguments) or Exit.OK


def run_to_exit(start: Callable[[], Coroutine[Any, Any, int]], *, as_json: bool) -> int:
    """Runs it and turns errors into exit codes."""
    try:
        return asyncio.run(start())
    except SpringtideError as error:
        show_error(error, as_json=as_json)
        if isinstance(error, InvalidArgument) and error.field in ("address", "router"):
            return Exit.USAGE
        return exit_code(error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough
        return Exit.OK


async def repeat(interval_s: float, render: Callable[[], Awaitable[str]]) -> None:
    """Redraws the screen until Ctrl-C: for --watch. Without a terminal it prints one page after the other.

    The first page must come; later ones may fail while a process is started again.
    """
    page = await render()
    if not sys.stdout.isatty():
        while True:
            click.echo(page)
            await asyncio.sleep(interval_s)
            page = await _page_or_error(render)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            shown = Text.from_ansi(page, no_wrap=True, overflow="ellipsis")
            live.update(shown, refresh=True)
            await asyncio.sleep(interval_s)
            page = await _page_or_error(render)


async def _page_or_error(render: Callable[[], Awaitable[str]]) -> str:
    try:
        return await render()
    except SpringtideError as error:
        return str(error)


class Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h: 90, 90s, 10m, 1h30m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        import re

        match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", value.strip().lower())
        if match is None or not any(match.groups()):
            self.fail(f"{value!r} is no duration; write for example 90s, 10m or 1h30m.", param, ctx)
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return hours * 3600 + minutes * 60 + seconds


def _address(parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise click.BadParameter(f"{value!r} is not host:port, for example 127.0.0.1:7400.", param=parameter)
    return value
