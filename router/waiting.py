"""Waiting for a worker: for the fronts, whose answer comes later, and for those who wait in a coroutine."""

import asyncio
from collections.abc import Callable

from router.core.admission import Ticket
from router.upstream import AttemptEnd, Dispatcher
from springtide.dataplane import Answer, OutcomeKind
from springtide.errors import SpringtideError, Unavailable


def later(
    dispatcher: Dispatcher,
    ticket: Ticket,
    front: str,
    seated: Callable[[], Answer],
    denied: Callable[[SpringtideError | None], Answer],
    left: Callable[[], None] | None = None,
) -> asyncio.Future[Answer]:
    """The answer for a ticket that has no seat yet: that of `seated` or `denied`, when it is granted or denied.

    The future is cancelled when the client leaves; `left` is told then.
    """
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def grant() -> None:
        if answer.done():  # the client left in this very instant
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), front)
        else:
            answer.set_result(seated())

    def deny(error: SpringtideError | None) -> None:
        if not answer.done():
            answer.set_result(denied(error))

    def over(future: "asyncio.Future[Answer]") -> None:
        if future.cancelled():
            dispatcher.cancel(ticket, front)
            if left is not None:
                left()

    answer.add_done_callback(over)
    dispatcher.hold(ticket, grant, deny)
    return answer


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
        if dispatcher.place(ticket):
            return
        dispatcher.hold(ticket, grant, deny)
        await granted
    except asyncio.CancelledError:
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            dispatcher.ended(ticket, AttemptEnd(OutcomeKind.CLIENT_GONE, False), front)
        dispatcher.cancel(ticket, front)
        raise
    except SpringtideError:
        dispatcher.closed(ticket, front, OutcomeKind.REFUSED)
        raise
