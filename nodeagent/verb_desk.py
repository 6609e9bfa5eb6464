"""Verbs that the control plane sends: each done once while this agent lives, and answered as often as it is asked."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from springtide.errors import Internal, NotFound, SpringtideError, Unavailable
from springtide.v1 import agent_pb2
from springtide.wire.verbs import done, failed

if TYPE_CHECKING:
    from nodeagent.worker import Worker

log = logging.getLogger(__name__)

Answer = Callable[[agent_pb2.VerbResult], Awaitable[None]]
_KEPT = 512  # answers, for orders that are sent again because an answer was lost


class VerbDesk:
    """Takes orders for the workers of one node."""

    def __init__(self, workers: Mapping[str, "Worker"]) -> None:
        self._workers = workers
        self._answers: dict[str, agent_pb2.VerbResult | None] = {}  # oldest first; None: under way
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, orders: Iterable[agent_pb2.VerbOrder], answer: Answer) -> None:
        """Begins what is new. `answer` sends a result; one that is lost is sent again with the order's next coming."""
        for order in orders:
            if order.order_id not in self._answers:
                self._answers[order.order_id] = None
                self._begin(self._do(order, answer))
            elif (known := self._answers[order.order_id]) is not None:
                self._begin(_send(answer, known))
        # Never one that is under way: it would be done twice.
        answered = [order_id for order_id, result in self._answers.items() if result is not None]
        for order_id in answered[: max(0, len(self._answers) - _KEPT)]:
            del self._answers[order_id]

    def _begin(self, work: "Awaitable[None]") -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, order: agent_pb2.VerbOrder, answer: Answer) -> None:
        try:
            async with asyncio.timeout(order.timeout_s):
                result = done(order.order_id, await self._worker(order.worker_id).verb(order))
        except SpringtideError as error:
            result = failed(order.order_id, error)
        except TimeoutError:
            told = f"{order.verb} was not done within {order.timeout_s:g} s."
            result = failed(order.order_id, Unavailable(told, reason="VERB_TIMEOUT"))
        except Exception as error:
            log.exception("verb %s of worker %s failed", order.verb, order.worker_id)
            result = failed(order.order_id, Internal(f"{type(error).__name__}: {error}"))
        log.info("verb %s for worker %s: %s", order.verb, order.worker_id, result.reason or "done")
        self._answers[order.order_id] = result
        await _send(answer, result)

    def _worker(self, worker_id: str) -> "Worker":
        worker = self._workers.get(worker_id)
        if worker is None:
            raise NotFound(kind="worker", name=worker_id, known=self._workers)
        return worker

    async def close(self) -> None:
        """Leaves what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _send(answer: Answer, result: agent_pb2.VerbResult) -> None:
    await answer(result)
