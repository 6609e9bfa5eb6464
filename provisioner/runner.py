"""Makes the provider converge on the orders: looks, calls, and tells what it knows.

One event loop owns it. Nothing that the provider raises ends it: a call that fails in any way that is no clear refusal
has an unknown outcome, and is looked up before it is repeated.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from provisioner.core.converge import Book, Done, Listing, No, Outcome, Unsure, coming, decide, finished
from provisioner.core.provider import OutcomeUnknown, Provider, Refused
from provisioner.metrics import ProvisionerMetrics
from springtide.clock import Clock
from springtide.model.provisioning import (
    CapabilitySet,
    GroupAnswer,
    GroupOrder,
    GroupStatus,
    Orders,
    ProvidedNode,
    ProvisionerReport,
    ShutdownOrder,
)

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class Runner:
    """`run` until cancelled. `apply` takes orders over, `report` says what is known; `on_change` is told when that has
    changed."""

    def __init__(
        self,
        provider: Provider,
        clock: Clock,
        metrics: ProvisionerMetrics,
        *,
        poll_interval_s: float,
        call_timeout_s: float,
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._metrics = metrics
        self._poll_interval_s = poll_interval_s
        self._call_timeout_s = call_timeout_s
        self._book = Book()
        self._orders = Orders()
        self._listing: Listing | None = None
        self._sets: dict[str, CapabilitySet] = {}
        self._answers: tuple[GroupAnswer, ...] = ()
        self._sequence = 0
        self._look_now = asyncio.Event()
        self._decide_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_change: Callable[[], None] = lambda: None
        self._list_error = ""

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change = callback

    @property
    def ready(self) -> bool:
        """The provider has been looked at: before that nothing can be said of its nodes."""
        return self._listing is not None

    @property
    def nodes(self) -> tuple[ProvidedNode, ...]:
        """As last listed, and those that are coming."""
        listed = self._listing.nodes if self._listing is not None else ()
        return (*listed, *coming(self._book, self._listing))

    def apply(self, orders: Orders) -> None:
        """All that is wanted now."""
        if orders != self._orders:
            self._orders = orders
            self._decide_now.set()

    def report(self) -> ProvisionerReport:
        """Everything that is known now."""
        self._sequence += 1
        return ProvisionerReport(tuple(self._sets.values()), self.nodes, self._answers, self._sequence)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Looks every poll interval and after each call; decides after each look and when orders change."""
        looking = asyncio.create_task(self._keep_looking())
        try:
            while True:
                self._decide_now.clear()
                wake_at = self._decide()
                left_s = None if wake_at is None else max(0.02, wake_at - self._clock.now())
                try:
                    async with asyncio.timeout(left_s):
                        await self._decide_now.wait()
                except TimeoutError:
                    pass
        finally:
            looking.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(looking, *self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Lets the provider go; nodes stay."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._provider.close()
        except Exception:
            log.exception("the provider cannot be closed")

    def _decide(self) -> float | None:
        decision = decide(self._book, self._orders, self._listing, self._sets, self._clock.now())
        for order in decision.stops:
            self._call("stop", order.group_id, self._stop(order))
        for group in decision.starts:
            self._call("start", group.group_id, self._start(group))
        if decision.answers != self._answers:
            self._answers = decision.answers
            self._on_change()
        elif decision.starts or decision.stops:
            self._on_change()
        self._metrics.nodes = self.nodes
        return decision.wake_at

    async def _start(self, order: GroupOrder) -> None:
        log.info("starts group %s of %s: %s", order.group_id, order.capability_set, ", ".join(order.node_ids))
        await self._provider.start(order)

    async def _stop(self, order: ShutdownOrder) -> None:
        log.info("gives group %s back: %s", order.group_id, order.reason)
        await self._provider.stop(order.group_id, order.node_ids)

    def _call(self, kind: str, group_id: str, call: Awaitable[None]) -> None:
        task = asyncio.create_task(self._finish(kind, group_id, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, kind: str, group_id: str, call: Awaitable[None]) -> None:
        outcome = await self._outcome(kind, group_id, call)
        label = {Done: "done", No: "refused", Unsure: "unknown"}[type(outcome)]
        self._metrics.calls.labels(kind, label).inc()
        finished(self._book, group_id, outcome, self._clock.now())
        self._look_now.set()
        self._decide_now.set()

    async def _outcome(self, kind: str, group_id: str, call: Awaitable[None]) -> Outcome:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await call
        except Refused as refused:
            log.warning("%s of group %s is refused: %s: %s", kind, group_id, refused.status, refused.message)
            return No(_status(refused.status, kind), refused.message)
        except OutcomeUnknown as unknown:
            log.warning("whether the %s of group %s had its effect is unknown: %s", kind, group_id, unknown)
            return Unsure(str(unknown))
        except TimeoutError:
            log.warning("the %s of group %s took more than %g s", kind, group_id, self._call_timeout_s)
            return Unsure(f"no answer within {self._call_timeout_s:g} s")
        except Exception as error:
            log.exception("the %s of group %s failed", kind, group_id)
            return Unsure(f"{type(error).__name__}: {error}")
        return Done()

    # ------------------------------------------------------------ looking

    async def _keep_looking(self) -> None:
        while True:
            self._look_now.clear()
            await self._look()
            try:
                async with asyncio.timeout(self._poll_interval_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        """A look that fails leaves the last one standing: no answer is not the absence of nodes."""
        begun_at = self._clock.now()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                sets = {found.name: found for found in await self._provider.capability_sets()}
                nodes = tuple(await self._provider.list())
        except Exception as error:
            self._metrics.listings.labels("failed").inc()
            text = str(error) or type(error).__name__
            if text != self._list_error:
                self._list_error = text
                known = isinstance(error, OutcomeUnknown | TimeoutError)
                log.warning("the provider cannot be asked: %s", text, exc_info=None if known else error)
            return
        self._metrics.listings.labels("done").inc()
        if self._list_error:
            self._list_error = ""
            log.info("the provider answers again")
        changed = self._listing is None or nodes != self._listing.nodes or sets != self._sets
        self._listing, self._sets = Listing(nodes, begun_at), sets
        self._decide_now.set()
        if changed:
            self._on_change()


def _status(name: str, kind: str) -> GroupStatus:
    """A provider's own word for a refusal is one of the six, or the one that fits the call."""
    try:
        return GroupStatus(name)
    except ValueError:
        return GroupStatus.WORKER_GROUP_TOO_MUCH if kind == "start" else GroupStatus.WORKER_GROUP_ID_NOT_FOUND
