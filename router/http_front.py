"""The OpenAI front: a director over the relay. Token routes go to workers; everything else is answered here."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs

import orjson

from router.cluster_status import ROUTES as CLUSTER_ROUTES
from router.cluster_status import ClusterStatus
from router.continuation import Continuation, attempt_end
from router.core.admission import Ticket
from router.core.retry import Verdict
from router.core.want import read_want
from router.pairs import Pair
from router.request_id import new_request_id
from router.resumed import asking_for_ids, go_on, with_reason
from router.upstream import Dispatcher
from router.waiting import later
from springtide.dataplane import (
    REQUEST_ID_HEADER,
    Answer,
    InvalidJson,
    Outcome,
    OutcomeKind,
    Reply,
    Request,
    Retry,
    Route,
    error_reply,
)
from springtide.errors import InvalidArgument, NotFound, SpringtideError

TOKEN_ROUTES = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings"))
FRONT = "http"
CONTINUATION_HEADER = b"x-springtide-continuation"
"""On streams: how this one would be continued on another worker (exact, same-distribution, none)."""
_TOLD = {g: ((CONTINUATION_HEADER, g.encode()),) for g in ("exact", "same-distribution", "none")}
_TRACEPARENT = b"traceparent"
_JSON = (b"content-type", b"application/json")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True, eq=False)
class Call:
    """A token request on its way."""

    ticket: Ticket
    request_id: bytes
    stream: bool
    body: bytes | None
    """Replaces the client's body: it named the pool where the engine knows the served name."""
    fault: Reply | None = None
    """What the client gets when no other worker takes it."""
    continuation: Continuation | None = None
    """Of a stream."""
    resumed: bool = False
    """The attempt under way goes on with a stream that was lost."""
    pair: Pair | None = None
    """Of a request that a prefill and a decode worker share."""


class HttpFront:
    """`healthy` says whether the control plane is connected: shown, never a reason to refuse."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        connected: Callable[[], bool] = lambda: True,
        cluster: ClusterStatus | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._cluster = cluster
        self._connected = connected
        self._started_at = int(time.time())
        self.stopping = False

    # ------------------------------------------------------------ director

    def direct(self, request: Request) -> Answer | Awaitable[Answer]:
        """Routes of this front; see the module."""
        path = request.path
        if path in TOKEN_ROUTES:
            if request.method != "POST":
                return _not_allowed(request, "POST")
            return self._generate(request)
        if path in CLUSTER_ROUTES and self._cluster is not None and request.method in ("GET", "HEAD"):
            return self._cluster.reply(request)
        return self._local(request, path)

    def _local(self, request: Request, path: str) -> Answer:
        local = {
            "/v1/models": self._models,
            "/health": self._health,
            "/healthz": self._alive,
            "/ready": self._ready,
        }.get(path)
        if local is None and path.startswith("/v1/models/"):
            local = self._model
        if local is None:
            routes = ", ".join(sorted((*TOKEN_ROUTES, "/v1/models", "/health", "/healthz", "/ready")))
            message = f"There is no route {path}. Known: {routes}."
            return error_reply(404, message, "invalid_request_error", "route_not_found")
        if request.method not in ("GET", "HEAD"):
            return _not_allowed(request, "GET")
        return local(request)

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """Accounts, and sends the request elsewhere where that is right."""
        call: Call = request.state
        way, pair = call.continuation, call.pair
        if pair is not None and pair.in_doubt(outcome):
            return Retry(self._paired(call, pair, request, outcome))
        if outcome.kind is OutcomeKind.OK:
            first_byte_at = None if call.resumed else outcome.first_byte_at
            self._dispatcher.served(call.ticket, outcome.events, first_byte_at, FRONT, outcome.finished_at)
            if way is not None:
                way.close()
            return None
        end = attempt_end(outcome, call.resumed)
        seat = call.ticket.seat
        if outcome.response_started and way is not None and seat is not None:
            end.continuable = way.lost(end, seat, outcome.error_code)
        ruling = self._dispatcher.ended(call.ticket, end, FRONT)
        if ruling.verdict not in (Verdict.RETRY, Verdict.REQUEUE, Verdict.CONTINUE):
            if pair is not None:
                pair.close()
            if way is not None:
                way.close()
                if outcome.response_started and outcome.answer is not None:
                    outcome.answer = with_reason(outcome.answer, way.bar)
            return None
        if outcome.response_started and way is not None:
            call.resumed = True
            call.fault = outcome.answer or call.fault
            return Retry(self._resume(call, way))
        if outcome.kind is not OutcomeKind.REFUSED:
            call.fault = outcome.answer
        return Retry(self._place(call) if pair is None else self._paired(call, pair, request))

    # ------------------------------------------------------------ tokens

    def _generate(self, request: Request) -> Answer | Awaitable[Answer]:
        extensions = request.extension_headers()
        request_id = extensions.get(REQUEST_ID_HEADER)
        if request_id is None or not _REQUEST_ID.fullmatch(request_id):
            request_id = new_request_id()
        try:
            call = self._call(request, request_id, extensions)
        except SpringtideError as error:
            return as_reply(error, request_id)
        request.state = call
        if call.pair is not None:
            return self._paired(call, call.pair, request)
        return self._place(call, request.started_at)

    def _call(self, request: Request, request_id: bytes, extensions: Mapping[bytes, bytes]) -> Call:
        try:
            body = request.json()
        except InvalidJson as error:
            problem = str(error)
            raise InvalidArgument(field="body", value="", problem=problem, remedy="Send a JSON object.") from None
        model = body.get("model")
        if model is None:
            models = self._dispatcher.admission.fleet.models()
            if len(models) != 1:
                remedy = f"Name one of: {', '.join(models)}." if models else "There is no pool yet."
                raise InvalidArgument(field="model", value=None, problem="is missing", remedy=remedy)
            model = models[0]
        if not isinstance(model, str):
            raise InvalidArgument(field="model", value=model, problem="is not a string", remedy="Name a model.")
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):  # engines read "yes" and 1 as they like
            raise InvalidArgument(field="stream", value=stream, problem="is not a boolean", remedy="Say true or false.")
        want = read_want(extensions, body, len(request.body), request_id.decode("latin-1"))
        ticket = self._dispatcher.open(model, None, want, request.started_at)
        fleet = self._dispatcher.admission.fleet
        served = fleet.table.pools[ticket.pool].served_model_name
        changed = orjson.dumps({**body, "model": served}) if served != model else None
        call = Call(ticket, request_id, stream is True, changed)
        traceparent = extensions.get(_TRACEPARENT, b"").decode("latin-1")
        if fleet.pairs:
            sent = body if changed is None else {**body, "model": served}
            call.pair = Pair.of(self._dispatcher, ticket, FRONT, request.path, model, sent)
            if call.pair is not None:
                call.pair.traceparent = traceparent
        if call.stream and request.path != "/v1/embeddings":
            chat = request.path == "/v1/chat/completions"
            way = call.continuation = Continuation.begin(
                self._dispatcher, ticket, FRONT, chat, body if served == model else {**body, "model": served}
            )
            way.traceparent = traceparent
            if way.terms is not None and not way.terms.ids_visible:
                call.body = asking_for_ids(changed or request.body, body)
        return call

    def _place(self, call: Call, now: float | None = None) -> Answer | Awaitable[Answer]:
        try:
            if self._dispatcher.place(call.ticket, now):
                if call.continuation is None:
                    return self._dispatcher.route(call.ticket, call.request_id, call.stream, call.body)
                return self._route(call)
        except SpringtideError as error:
            return self._denied(call, error)
        seated, denied, way = partial(self._route, call), partial(self._denied, call), call.continuation
        return later(self._dispatcher, call.ticket, FRONT, seated, denied, way.close if way is not None else None)

    def _route(self, call: Call, body: bytes | None = None) -> Route:
        route = self._dispatcher.route(call.ticket, call.request_id, call.stream, body or call.body)
        way = call.continuation
        if way is None:
            return route
        if way.kept is not None:
            way.kept.restart()
        route.shaper = way.kept
        route.reply_headers += _TOLD[way.guarantee]
        return route

    # ------------------------------------------------------------ two workers

    async def _paired(self, call: Call, pair: Pair, request: Request, judging: Outcome | None = None) -> Answer:
        """A decode worker that has the prompt's KV from a prefill worker, or computes it. `judging`: an attempt whose
        end is not accounted for yet."""
        way = call.continuation
        try:
            if judging is not None:
                ruling = await pair.judge(attempt_end(judging, call.resumed))
                if ruling.verdict is Verdict.RETRY:
                    call.fault = judging.answer
                elif ruling.verdict is not Verdict.REQUEUE:
                    if way is not None:
                        way.close()
                    return judging.answer or self._refusal(call, None)
            body = await pair.begin(call.body or request.body, call.request_id)
        except SpringtideError as error:
            if way is not None:
                way.close()
            return self._refusal(call, error)
        except asyncio.CancelledError:  # the client left
            if way is not None:
                way.close()
            raise
        return pair.route(self._route(call, body))

    async def _resume(self, call: Call, way: Continuation) -> Answer:
        """A stream that was lost goes on elsewhere, or ends explicitly."""
        try:
            found = await go_on(way, call.request_id)
            if isinstance(found, Route):
                return found
            reply = Reply(200, (), found)
        except SpringtideError as error:
            reply = as_reply(error)
        except asyncio.CancelledError:  # the client left
            way.close()
            raise
        way.close()
        return reply

    def _denied(self, call: Call, error: SpringtideError | None) -> Reply:
        reply = self._refusal(call, error)
        self._dispatcher.closed(call.ticket, FRONT, OutcomeKind.REFUSED)
        if call.continuation is not None:
            call.continuation.close()
        return reply

    def _refusal(self, call: Call, error: SpringtideError | None) -> Reply:
        if error is not None and call.fault is None:
            reply = as_reply(error, call.request_id)
        elif call.fault is not None:
            headers = tuple(h for h in call.fault.headers if h[0] != REQUEST_ID_HEADER)
            reply = Reply(call.fault.status, (*headers, (REQUEST_ID_HEADER, call.request_id)), call.fault.body)
        else:
            reply = error_reply(503, "The router is stopping.", "service_unavailable_error", "stopping", close=True)
        return reply

    # ------------------------------------------------------------ answered here

    def _models(self, request: Request) -> Reply:
        data = [self._shown(name) for name in self._dispatcher.admission.fleet.models()]
        return _json(200, {"object": "list", "data": data})

    def _model(self, request: Request) -> Reply:
        name = request.path.removeprefix("/v1/models/")
        models = self._dispatcher.admission.fleet.models()
        if name not in models:
            return as_reply(NotFound(kind="model", name=name, known=models))
        return _json(200, self._shown(name))

    def _shown(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "springtide"}

    def _alive(self, request: Request) -> Reply:
        return _json(200, {"status": "ok"})

    def _ready(self, request: Request) -> Reply:
        """Whether requests should be sent here; with `?model=NAME` whether that model has a worker now."""
        admission = self._dispatcher.admission
        problem, after_s = "", 1.0
        model = parse_qs(request.query).get("model", [""])[0]
        try:
            pool = admission.fleet.pool_of(model) if model else None
        except NotFound as error:
            return as_reply(error)
        except SpringtideError:
            pool = None
        if self.stopping:
            problem = "stopping"
        elif not admission.fleet.known:
            problem = "no routing table yet"
        elif pool is not None and not admission.fleet.active(pool.name):
            problem = "no worker is active"
            after_s = admission.retry_after_s(pool.name, asyncio.get_running_loop().time())
        headers = ((b"retry-after", b"%d" % after_s),) if problem else ()
        return _json(503 if problem else 200, {"status": problem or "ready"}, headers)

    def _health(self, request: Request) -> Reply:
        admission = self._dispatcher.admission
        serving = admission.fleet.known and not self.stopping
        status = "stopping" if self.stopping else "ok" if serving else "no routing table yet"
        shown = {
            "status": status,
            "controlplane": "connected" if self._connected() else "away",
            "revision": admission.fleet.table.revision,
            "models": {
                model: {
                    "active": sum(admission.fleet.active(name) for name in pools),
                    "waiting": sum(admission.waiting(name) for name in pools),
                }
                for model, pools in admission.fleet.pools_of_models().items()
            },
        }
        return _json(200 if serving else 503, shown, () if serving else ((b"retry-after", b"1"),))


def as_reply(error: SpringtideError, request_id: bytes = b"") -> Reply:
    """The error in OpenAI's shape, with Retry-After where it may be tried again."""
    headers = [_JSON]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    if request_id:
        headers.append((REQUEST_ID_HEADER, request_id))
    return Reply(error.http_status, tuple(headers), orjson.dumps(error.openai_body()))


def _json(status: int, value: object, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    return Reply(status, (_JSON, *headers), orjson.dumps(value))


def _not_allowed(request: Request, method: str) -> Reply:
    message = f"{request.path} takes {method}, not {request.method}."
    return error_reply(
        405, message, "invalid_request_error", "method_not_allowed", headers=((b"allow", method.encode()),)
    )
