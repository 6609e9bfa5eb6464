"""Verbs under way: orders that wait for an agent's answer. In memory only: who asked learns of a loss by an error.

An order is sent with each answer of its node's session until the agent has answered it, so that it survives a session's
end; agents know an order again by its id.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.loops.hub import Hub
from springtide.errors import Exhausted, Unavailable
from springtide.v1 import agent_pb2 as pb
from springtide.wire.verbs import outcome

MAX_PENDING = 256  # of one node
_ANSWER_SLACK_S = 2.0  # the agent's own time-out comes first


@dataclass(slots=True)
class _Pending:
    order: pb.VerbOrder
    answer: "asyncio.Future[pb.VerbResult]"


@dataclass(slots=True)
class Verbs:
    """One board for all nodes."""

    hub: Hub
    _pending: dict[str, dict[str, _Pending]] = field(default_factory=dict)  # by node, by order id

    async def perform(
        self, node_id: str, worker_id: str, incarnation: int, verb: str, args: Mapping[str, str], timeout_s: float
    ) -> dict[str, Any]:
        """What the agent answers. Raises its error; Unavailable when it does not answer in time, Exhausted."""
        waiting = self._pending.setdefault(node_id, {})
        if len(waiting) >= MAX_PENDING:
            raise Exhausted(f"{MAX_PENDING} verbs wait for node {node_id}.", reason="TOO_MANY_VERBS", retry_after_s=1.0)
        order = pb.VerbOrder(
            order_id=secrets.token_hex(8),
            worker_id=worker_id,
            incarnation=incarnation,
            verb=verb,
            args=dict(args),
            timeout_s=timeout_s,
        )
        pending = _Pending(order, asyncio.get_running_loop().create_future())
        waiting[order.order_id] = pending
        self.hub.wake_node(node_id)
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_SLACK_S):
                return outcome(await pending.answer)
        except TimeoutError:
            raise Unavailable(
                f"node {node_id} has not answered {verb} for worker {worker_id} within {timeout_s:g} s.",
                reason="VERB_TIMEOUT",
                remedy="It may have been done: ask again, or look at the worker.",
            ) from None
        finally:
            waiting.pop(order.order_id, None)
            if not waiting:
                self._pending.pop(node_id, None)

    def orders(self, node_id: str) -> list[pb.VerbOrder]:
        """What the node has not answered yet."""
        return [pending.order for pending in self._pending.get(node_id, {}).values()]

    def answered(self, node_id: str, result: pb.VerbResult) -> None:
        """The first answer counts; one that nobody waits for any more is dropped."""
        pending = self._pending.get(node_id, {}).get(result.order_id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(result)
