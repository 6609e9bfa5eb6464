"""A lean HTTP/1.1 and event-stream client for one's own upstreams: the router's `Generate`, an agent's probes.

    async with post(address, "/v1/completions", body, headers) as answer:
        if answer.event_stream:
            async for event in answer.events():   # each `data:` value up to, not including, [DONE]
                ...
        else:
            whole = await answer.read()

Leaving the block before the end cuts the connection, which aborts the engine's request. Failures are `UpstreamFailure`
with the same kinds as the relay's outcomes. Reading pauses while the consumer is behind.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

from springtide.dataplane.events import EventStream, EventTooLong, error_object, event_data, split_events
from springtide.dataplane.framing import Body, FramingError
from springtide.dataplane.heads import HeadError, body_of, encode_request, parse_response_head
from springtide.dataplane.messages import Address, Headers, Limits, OutcomeKind, Request, Route
from springtide.dataplane.upstream import Job, Upstream, UpstreamPool

_HIGH_WATER_BYTES = 256 * 1024


class UpstreamFailure(Exception):
    """The upstream failed. `kind` as in the relay's outcomes; `error` is the engine's own error object, if it gave one.

    `timeout` names the bound that ran out: connect, first_byte, idle or total.
    """

    def __init__(
        self, kind: OutcomeKind, message: str, error: dict[str, object] | None = None, timeout: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.error = error
        self.timeout = timeout


class Answer:
    """An answer whose head has arrived. Use inside `async with` only."""

    def __init__(self, route: Route, limits: Limits, method: str) -> None:
        self.status = 0
        self.headers: Headers = []
        self.refusal = ""
        self.event_stream = False
        self.count = 0
        """Events given so far."""
        self._route = route
        self._limits = limits
        self._method = method
        self._head = b""
        self._body: Body | None = None
        self._keep_alive = False
        self._conn: Upstream | None = None
        self._received = False
        self._chunks: deque[bytes] = deque()
        self._queued = 0
        self._paused = False
        self._ended = False
        self._failure: UpstreamFailure | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._first = True
        self._deadline: float | None = None

    # ------------------------------------------------------------ the connection's side

    def upstream_data(self, data: bytes) -> None:
        """One read."""
        self._received = True
        try:
            if self._body is None:
                rest = self._read_head(data)
                if rest is None:
                    return
                data = rest
            body = self._body
            assert body is not None
            payload = body.feed(data)
            self._ended = body.done
        except (HeadError, FramingError) as error:
            self._fail(UpstreamFailure(OutcomeKind.BAD_RESPONSE, str(error)))
            return
        if payload:
            self._chunks.append(payload)
            self._queued += len(payload)
            if self._queued > _HIGH_WATER_BYTES and not self._paused and not self._ended and self._conn is not None:
                self._paused = True
                self._conn.hold_back(True)
        self._wake()

    def upstream_read(self, data: bytes) -> Job:
        """One read of several."""
        return self.upstream_data, data

    def upstream_events(self, data: bytes, count: int) -> Job:
        """One read over a link."""
        return self.upstream_data, data

    def upstream_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        self._conn = None
        if self._body is not None and self._body.until_close and error is None:
            self._ended = True
            self._wake()
        elif not self._ended:
            self._fail(UpstreamFailure(OutcomeKind.UPSTREAM_EOF, f"the upstream closed the connection ({error})"))

    def _read_head(self, data: bytes) -> bytes | None:
        data = self._head + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                if len(data) > self._limits.max_head_bytes:
                    raise HeadError(502, "the answer's head is too long")
                return None
            head = parse_response_head(data[:end], self._method)
            data = data[end:]
            if head.status >= 200:
                break
        self._head = b""
        self.status, self.headers, self.refusal = head.status, head.headers, head.refusal
        self.event_stream = head.event_stream and head.status == 200
        self._body, self._keep_alive = body_of(head.length), head.keep_alive
        return data

    def cut(self) -> None:
        """See `Call.cut`."""
        self._fail(UpstreamFailure(OutcomeKind.ABORTED, "cut by the router"))

    def _fail(self, failure: UpstreamFailure) -> None:
        self._failure = failure
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.drop()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(False)

    # ------------------------------------------------------------ the consumer's side

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    async def _wait(self) -> None:
        """Until something arrives. Raises UpstreamFailure on a time-out."""
        loop = asyncio.get_running_loop()
        phase = "first_byte" if self._first else "idle"
        bound = self._route.first_byte_timeout_s if self._first else self._route.idle_timeout_s
        if self._deadline is not None:
            left = max(0.0, self._deadline - loop.time())
            if bound is None or left < bound:
                bound, phase = left, "total"
        waiter = self._waiter = loop.create_future()
        timer = None if bound is None else loop.call_later(bound, self._time_out, waiter)
        try:
            timed_out = await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        if timed_out:
            failure = UpstreamFailure(OutcomeKind.TIMEOUT, f"{phase} time-out after {bound:g} s", timeout=phase)
            self._fail(failure)
            raise failure

    def _time_out(self, waiter: "asyncio.Future[bool]") -> None:
        if not waiter.done():
            waiter.set_result(True)

    async def _next_chunk(self) -> bytes | None:
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            await self._wait()
        self._first = False
        payload = self._chunks.popleft()
        self._queued -= len(payload)
        if self._paused and self._queued < _HIGH_WATER_BYTES // 4 and self._conn is not None:
            self._paused = False
            self._conn.hold_back(False)
        return payload

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The whole body. Raises UpstreamFailure, also when it is longer than `max_bytes` (default: 32 MiB)."""
        bound = self._limits.max_body_bytes if max_bytes is None else max_bytes
        parts, size = [], 0
        while (payload := await self._next_chunk()) is not None:
            size += len(payload)
            if size > bound:
                raise UpstreamFailure(OutcomeKind.BAD_RESPONSE, f"the answer is longer than {bound} bytes")
            parts.append(payload)
        return b"".join(parts)

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """The data of events, in lists of what came in one read; ends after `[DONE]`.

        Raises UpstreamFailure: UPSTREAM_ERROR_EVENT with the engine's error, UPSTREAM_EOF where `[DONE]` is missing.
        Events before a failure are given first.
        """
        scan = EventStream(self._limits.max_event_bytes)
        while True:
            payload = await self._next_chunk()
            if payload is None:
                if scan.done:
                    return
                raise UpstreamFailure(OutcomeKind.UPSTREAM_EOF, "the event stream ended without [DONE]")
            try:
                whole = scan.feed(payload)
            except EventTooLong as error:
                raise UpstreamFailure(OutcomeKind.BAD_RESPONSE, str(error)) from None
            found = [event_data(event) for event in split_events(whole)]
            batch = [data for data in found if data and data.strip() != b"[DONE]"]
            if batch:
                self.count += len(batch)
                yield batch
            if scan.error is not None:
                error_found = error_object(scan.error)
                raise UpstreamFailure(
                    OutcomeKind.UPSTREAM_ERROR_EVENT, str(error_found.get("message") or "engine error"), error_found
                )
            if scan.done:
                if not self._ended and not self._chunks and self._conn is not None:
                    await asyncio.sleep(0)  # the closing chunk usually is in the same read or the next
                return

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event; see `batches`."""
        async for batch in self.batches():
            for data in batch:
                yield data

    def _leave(self) -> None:
        conn, self._conn = self._conn, None
        if conn is None:
            return
        if self._ended and self._keep_alive and self._body is not None and not self._body.rest and not self._failure:
            conn.release(asyncio.get_running_loop().time())
        else:
            conn.drop()


class Call:
    """An unsent request; `async with` sends it and gives the Answer. Raises UpstreamFailure."""

    def __init__(self, request: Request, route: Route, pool: UpstreamPool | None, limits: Limits) -> None:
        self._request = request
        self._route = route
        self._own_pool = pool is None
        self._pool = pool or UpstreamPool(limits)
        self._limits = limits
        self._answer: Answer | None = None
        self._cut = False

    async def __aenter__(self) -> Answer:
        conn = self._pool.take(self._route.address)
        reused = conn is not None
        deadline = None
        if self._route.total_timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + self._route.total_timeout_s
        while True:
            conn = conn or await self._connect(deadline)
            answer = self._answer = Answer(self._route, self._limits, self._request.method)
            answer._deadline = deadline
            answer._conn = conn
            conn.sink = answer
            conn.served += 1
            if self._cut:  # while it was connecting
                answer.cut()
            else:
                conn.transport.write(encode_request(self._request, self._route))
            try:
                while answer._body is None:
                    if answer._failure is not None:
                        raise answer._failure
                    await answer._wait()
                if answer._failure is not None and not answer._chunks:
                    raise answer._failure
                return answer
            except UpstreamFailure as failure:
                if not reused or answer._received or failure.kind is not OutcomeKind.UPSTREAM_EOF:
                    self._leave()
                    raise
                conn, reused = None, False  # a kept-alive connection had died: once more, on a fresh one
            except BaseException:
                self._leave()
                raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def cut(self) -> None:
        """Ends the request: whoever waits for its answer gets an UpstreamFailure of the kind ABORTED."""
        self._cut = True
        if self._answer is not None:
            self._answer.cut()

    async def _connect(self, deadline: float | None) -> Upstream:
        bound = self._route.connect_timeout_s
        if deadline is not None:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            bound = left if bound is None else min(bound, left)
        try:
            return await asyncio.wait_for(self._pool.connect(self._route.address), bound)
        except TimeoutError:
            message = f"connecting to {self._route.address} took longer than {bound:g} s"
            raise UpstreamFailure(OutcomeKind.TIMEOUT, message, timeout="connect") from None
        except OSError as error:
            message = f"cannot connect to {self._route.address}: {error}"
            raise UpstreamFailure(OutcomeKind.CONNECT_FAILED, message) from None

    def _leave(self) -> None:
        if self._answer is not None:
            self._answer._leave()
        if self._own_pool:
            self._pool.close()


def call(
    method: str,
    route: Route,
    target: str,
    body: bytes = b"",
    headers: Headers | None = None,
    pool: UpstreamPool | None = None,
    limits: Limits | None = None,
) -> Call:
    """A request along a Route, with its time-outs and headers. Without a pool the connection is closed afterwards."""
    return Call(Request(method, target, headers or [], body), route, pool, limits or Limits())


def post(
    address: Address,
    target: str,
    body: bytes,
    headers: Headers | None = None,
    *,
    pool: UpstreamPool | None = None,
    total_timeout_s: float | None = None,
) -> Call:
    """POST with JSON content type."""
    lines = [(b"content-type", b"application/json"), *(headers or [])]
    return call("POST", Route(address, total_timeout_s=total_timeout_s), target, body, lines, pool)


def get(
    address: Address,
    target: str,
    headers: Headers | None = None,
    *,
    pool: UpstreamPool | None = None,
    total_timeout_s: float | None = None,
) -> Call:
    """GET."""
    return call("GET", Route(address, total_timeout_s=total_timeout_s), target, b"", headers, pool)
