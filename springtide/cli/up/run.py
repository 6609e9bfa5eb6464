"""The signals of `springtide up`: the first one stops the stack, a second one makes it immediate."""

import asyncio
import signal
from collections.abc import Callable

from springtide.cli.exits import Exit
from springtide.cli.up.options import UpPlan
from springtide.cli.up.ownership import owned
from springtide.cli.up.screen import Screen
from springtide.cli.up.stack import Stack
from springtide.errors import SpringtideError

# Wrappers such as timeout(1) pass one signal on twice, to the process and to its group.
ONE_SIGNAL_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(plan: UpPlan, make: Callable[[UpPlan, Screen], Stack] = Stack) -> Exit:
    """Until it is told to stop. Raises SpringtideError when the stack could not start (nothing is left then)."""
    screen = Screen()
    try:
        with owned(plan.options.data_dir, screen.live):
            return asyncio.run(_run(make(plan, screen)))
    except KeyboardInterrupt:  # while it waited for an earlier run to end
        return Exit.INTERRUPTED


async def _run(stack: Stack) -> Exit:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def on_signal() -> None:
        nonlocal first_at
        if not told.is_set():
            first_at = loop.time()
        elif loop.time() - first_at > ONE_SIGNAL_S:
            stack.forced.set()
        told.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(stack.serve())
    telling = asyncio.create_task(told.wait())
    await asyncio.wait({serving, telling}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    serving.cancel()
    failure = await _failure(serving)
    code = await stack.stop()
    if failure is not None:
        raise failure
    return code


async def _failure(serving: asyncio.Task[None]) -> SpringtideError | None:
    """Why serving ended by itself; None when it was told to. A fault of ours is raised as it is."""
    try:
        await serving
    except asyncio.CancelledError:
        return None
    except SpringtideError as error:
        return error
    except BaseExceptionGroup as group:
        found = _first(group)
        if found is None:
            raise
        return found
    return None


def _first(group: BaseExceptionGroup[BaseException]) -> SpringtideError | None:
    for error in group.exceptions:
        if isinstance(error, SpringtideError):
            return error
        if isinstance(error, BaseExceptionGroup) and (inner := _first(error)) is not None:
            return inner
    return None
