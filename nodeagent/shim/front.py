"""The worker's only reachable port: token routes and nothing else, counted, and refused before the engine sees them."""

from nodeagent.shim.state import DRAINING, OPEN, PAUSED, RUNNING, ShimState
from springtide.dataplane.messages import (
    Answer,
    Outcome,
    OutcomeKind,
    Reply,
    Request,
    Retry,
    Route,
    error_reply,
    parse_address,
)
from springtide.link import OFFER, is_linked

INCARNATION_HEADER = b"x-springtide-incarnation"
REFUSAL_HEADER = b"x-springtide-refusal"
TOKEN_ROUTES = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"))
_MESSAGES = {
    "incarnation": "this worker's engine was started again since you learned of it",
    "gone": "this worker's engine has ended",
    "draining": "this worker finishes what it has and takes nothing new",
    "paused": "this worker is paused",
    "starting": "this worker's engine is not ready yet",
    "full": "this worker has as many requests as it admits",
}


class Front:
    """The director of the data port."""

    def __init__(self, state: ShimState) -> None:
        self._state = state
        self._incarnation = str(state.launch.incarnation).encode()
        address = parse_address(state.launch.engine_endpoint)
        # Bounds on an answer's time are the router's: a shim knows neither prompt nor patience.
        self._counted = Route(address, key="counted")
        self._offering = Route(address, key="counted", reply_headers=OFFER)
        self._uncounted = Route(address, key="uncounted", total_timeout_s=30.0)

    def direct(self, request: Request) -> Answer:
        """Admits, refuses or answers 404."""
        state = self._state
        if request.path == "/v1/models" and request.method == "GET":
            return self._uncounted if state.process == RUNNING else self._refuse("gone")
        if request.path not in TOKEN_ROUTES:
            return error_reply(404, f"no route {request.path}", "invalid_request_error", "route_not_found")
        if request.method != "POST":
            allow = ((b"allow", b"POST"),)
            message = f"{request.path} takes POST"
            return error_reply(405, message, "invalid_request_error", "method_not_allowed", None, allow)
        reason = self._refusal(request)
        if reason:
            return self._refuse(reason)
        state.enter()
        # Only routers are offered the link: nobody else names an incarnation.
        asks = request.header(INCARNATION_HEADER) is not None and not is_linked(request)
        return self._offering if asks else self._counted

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """Counts the end of an admitted request."""
        if outcome.route.key != "counted":
            return None
        state = self._state
        state.relayed_bytes += outcome.bytes
        if outcome.kind is OutcomeKind.OK:
            state.total_served += 1
        elif outcome.kind is OutcomeKind.CLIENT_GONE:
            state.client_gone_total += 1
        elif outcome.kind is OutcomeKind.ABORTED:
            state.aborted_total += 1
        state.leave()
        return None

    def _refusal(self, request: Request) -> str:
        state = self._state
        incarnation = request.header(INCARNATION_HEADER)
        if incarnation is not None and incarnation != self._incarnation:
            return "incarnation"
        if state.process != RUNNING:
            return "gone"
        if state.admission != OPEN:
            return {DRAINING: "draining", PAUSED: "paused"}.get(state.admission, "starting")
        return "full" if state.in_flight >= state.max_in_flight else ""

    def _refuse(self, reason: str) -> Reply:
        self._state.refused_total += 1
        headers = ((REFUSAL_HEADER, reason.encode()), (b"retry-after", b"1"))
        return error_reply(503, _MESSAGES[reason], "service_unavailable_error", reason, None, headers)
