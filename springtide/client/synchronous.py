"""The client for code without an event loop: the asyncio client on a loop of its own, in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from springtide.client.asynchronous import CALL_TIMEOUT_S, AsyncSpringtide, Event
from springtide.rpc.client import ChannelSecurity
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import generation_pb2 as gen
from springtide.v1.types_pb2 import Decision, Node, Pool, PoolSpec, Worker
from springtide.v1.types_pb2 import Event as RecordedEvent

T = TypeVar("T")


class Springtide:
    """As AsyncSpringtide, blocking. Use it as a context manager, or `close()` it. Threads may share one."""

    def __init__(
        self,
        address: str | None = None,
        router: str | None = None,
        *,
        security: ChannelSecurity | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="springtide-client", daemon=True)
        self._thread.start()
        self._client = AsyncSpringtide(address, router, security=security, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def pools(self) -> list[Pool]:
        return self._wait(self._client.pools())

    def pool(self, name: str) -> Pool:
        return self._wait(self._client.pool(name))

    def apply(self, spec: PoolSpec | Mapping[str, Any], *, validate_only: bool = False) -> tuple[Pool, bool]:
        return self._wait(self._client.apply(spec, validate_only=validate_only))

    def delete(self, name: str, *, drain: bool = False) -> None:
        self._wait(self._client.delete(name, drain=drain))

    def scale(self, pool: str, workers: int | None) -> Pool:
        return self._wait(self._client.scale(pool, workers))

    def pause(self, pool: str, *, hold_s: float | None = None, reason: str = "") -> Pool:
        return self._wait(self._client.pause(pool, hold_s=hold_s, reason=reason))

    def resume(self, pool: str) -> Pool:
        return self._wait(self._client.resume(pool))

    def workers(self, *, pool: str = "", node: str = "") -> list[Worker]:
        return self._wait(self._client.workers(pool=pool, node=node))

    def worker(self, worker_id: str) -> Worker:
        return self._wait(self._client.worker(worker_id))

    def drain(self, worker_id: str, *, timeout_s: float | None = None, reason: str = "") -> Worker:
        return self._wait(self._client.drain(worker_id, timeout_s=timeout_s, reason=reason))

    def sleep(self, worker_id: str, *, timeout_s: float | None = None, reason: str = "") -> Worker:
        return self._wait(self._client.sleep(worker_id, timeout_s=timeout_s, reason=reason))

    def lend(self, worker_id: str, to: str) -> Worker:
        return self._wait(self._client.lend(worker_id, to))

    def reclaim(self, worker_id: str) -> Worker:
        return self._wait(self._client.reclaim(worker_id))

    def verb(
        self, worker_id: str, verb: str, args: Mapping[str, str] | None = None, *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        return self._wait(self._client.verb(worker_id, verb, args, timeout_s=timeout_s))

    def set_weights(self, pool: str, version: str, source: str, *, barrier: bool = False) -> Pool:
        return self._wait(self._client.set_weights(pool, version, source, barrier=barrier))

    def undrain(self, worker_id: str) -> Worker:
        return self._wait(self._client.undrain(worker_id))

    def activate(self, worker_id: str) -> Worker:
        return self._wait(self._client.activate(worker_id))

    def cancel(self, worker_id: str) -> Worker:
        return self._wait(self._client.cancel(worker_id))

    def nodes(self) -> list[Node]:
        return self._wait(self._client.nodes())

    def cordon(self, node_id: str, *, reason: str = "") -> Node:
        return self._wait(self._client.cordon(node_id, reason=reason))

    def uncordon(self, node_id: str) -> Node:
        return self._wait(self._client.uncordon(node_id))

    def notice(self, node_id: str, *, in_s: float = 0.0, withdraw: bool = False) -> Node:
        return self._wait(self._client.notice(node_id, in_s=in_s, withdraw=withdraw))

    def decisions(self, *, pool: str = "", limit: int = 0, skip_holds: bool = False) -> list[Decision]:
        return self._wait(self._client.decisions(pool=pool, limit=limit, skip_holds=skip_holds))

    def preview(
        self,
        pool: str,
        *,
        policy: str = "",
        settings: Mapping[str, Any] | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        waiting: int | None = None,
    ) -> cp.PreviewScalingResponse:
        return self._wait(
            self._client.preview(
                pool,
                policy=policy,
                settings=settings,
                min_workers=min_workers,
                max_workers=max_workers,
                waiting=waiting,
            )
        )

    def explain(self, decision_id: int = 0, *, pool: str = "") -> cp.ExplainDecisionResponse:
        return self._wait(self._client.explain(decision_id, pool=pool))

    def events(self, *, pool: str = "", limit: int = 0, after_event_id: int = 0) -> list[RecordedEvent]:
        return self._wait(self._client.events(pool=pool, limit=limit, after_event_id=after_event_id))

    def watch_events(self, *, pool: str = "", after_event_id: int | None = None) -> Iterator[RecordedEvent]:
        return self._iterate(self._client.watch_events(pool=pool, after_event_id=after_event_id))

    def metrics(self, *, pool: str = "") -> cp.GetMetricsResponse:
        return self._wait(self._client.metrics(pool=pool))

    def summary(self) -> cp.GetSummaryResponse:
        return self._wait(self._client.summary())

    def status(self) -> cp.GetStatusResponse:
        return self._wait(self._client.status())

    def provisioners(self) -> list[cp.ProvisionerStatus]:
        return self._wait(self._client.provisioners())

    def create_token(self, provisioner_id: str, *, valid_for_s: float | None = None) -> cp.CreateJoinTokenResponse:
        return self._wait(self._client.create_token(provisioner_id, valid_for_s=valid_for_s))

    def health(self, *, router: bool = False, service: str = "") -> str:
        return self._wait(self._client.health(router=router, service=service))

    def models(self) -> list[gen.Model]:
        return self._wait(self._client.models())

    def generate(self, pool: str, prompt: str | None = None, **options: Any) -> Generator[Event, None, None]:
        """As AsyncSpringtide.generate, with the same options."""
        return self._iterate(self._client.generate(pool, prompt, **options))

    def text(self, pool: str, prompt: str | None = None, **options: Any) -> str:
        """The whole answer of `generate`."""
        return self._wait(self._client.text(pool, prompt, **options))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a Ctrl-C of the caller ends the call too
            raise

    def _iterate(self, source: AsyncIterator[T]) -> Generator[T, None, None]:
        async def step() -> tuple[bool, T | None]:
            try:
                return True, await anext(source)
            except StopAsyncIteration:
                return False, None

        async def leave() -> None:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

        try:
            while True:
                more, item = self._wait(step())
                if not more:
                    return
                yield item  # type: ignore[misc]
        finally:
            self._wait(leave())
