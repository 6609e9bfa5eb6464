"""Waiting for a worker, for those who wait in a coroutine."""

import asyncio

from router.core.admission import Ticket
from router.upstream import AttemptEnd, Dispatcher
from springtide.dataplane import OutcomeKind
from springtide.errors import SpringtideError, Unavailable


async def seated(dispatcher: Dispatcher, ticket: Ticket, front: str, fault: SpringtideError | None = None) -> None:
    """Returns with `ticket.seat` set. Raises SpringtideError where no worker takes it in time; it is closed then.

    `fault`: raised where nobody but the worker that failed is there.
    Cancelled: the client left, and nothing of it stays behind.
    """
    granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def grant() -> None:
        if granted.done():  # the client left in this very instant
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), front)
        else:
            granted.set_result(None)

    def deny(error: SpringtideError | None) -> None:
        if not granted.done():
            granted.set_exception(error or fault or Unavailable("The router is stopping.", reason="STOPPING"))

    try:
        if dispatcher.place(ticket, grant, deny):
            return
        await granted
    except asyncio.CancelledError:
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), front)
        dispatcher.cancel(ticket, front)
        raise
    except SpringtideError:
        dispatcher.closed(ticket, front, OutcomeKind.REFUSED)
        raise
