"""The shim's control interface: HTTP on a unix socket that only its user can open; see shim.proto."""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import parse_qs

from google.protobuf import json_format
from google.protobuf.message import Message

from nodeagent.shim.state import DRAINING, ENDED, OPEN, PAUSED, STARTING, ShimState
from springtide.dataplane.messages import Answer, Outcome, Reply, Request, Retry, error_reply
from springtide.v1 import shim_pb2

MAX_WAIT_S = 60.0
MAX_GRACE_S = 86_400.0
_ADMISSIONS = (STARTING, OPEN, PAUSED, DRAINING)

M = TypeVar("M", bound=Message)


class Control:
    """The director of the control socket: answers everything itself.

    `stop(grace_s)` begins the engine's stop, `abort()` cuts what is in flight, `leave()` ends the shim.
    """

    def __init__(
        self,
        state: ShimState,
        stop: Callable[[float], None],
        abort: Callable[[], int],
        leave: Callable[[], None],
    ) -> None:
        self._state = state
        self._stop = stop
        self._abort = abort
        self._leave = leave
        self.last_contact = state.now()

    def direct(self, request: Request) -> Answer | Awaitable[Answer]:
        """Serves one control request."""
        self.last_contact = self._state.now()
        try:
            match request.method, request.path:
                case "GET", "/v1/status":
                    return self._status(request)
                case "POST", "/v1/admission":
                    return self._admission(_parse(request, shim_pb2.SetAdmission()))
                case "POST", "/v1/stop":
                    return self._begin_stop(_parse(request, shim_pb2.StopEngine()))
                case "POST", "/v1/quit":
                    return self._quit()
        except (ValueError, json_format.ParseError) as error:
            return _error(400, str(error))
        return _error(404, f"no route {request.method} {request.path}")

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """Never called: nothing is routed."""
        return None

    def _status(self, request: Request) -> Answer | Awaitable[Answer]:
        query = parse_qs(request.query)
        after = int(query.get("after", ["0"])[0])
        wait_s = min(float(query.get("wait_s", ["0"])[0]), MAX_WAIT_S)
        if wait_s > 0 and self._state.version <= after:
            return self._later(after, wait_s)
        return self._reply()

    async def _later(self, after: int, wait_s: float) -> Answer:
        await self._state.wait_above(after, wait_s)
        self.last_contact = self._state.now()
        return self._reply()

    def _admission(self, order: shim_pb2.SetAdmission) -> Answer:
        state = self._state
        if order.generation < state.generation:
            return _error(409, f"generation {order.generation} is older than {state.generation}", "OLDER_GENERATION")
        if order.admission not in _ADMISSIONS:
            return _error(400, f"admission {order.admission} is not one of STARTING, OPEN, PAUSED, DRAINING")
        state.generation = order.generation
        if order.max_in_flight > 0:
            state.max_in_flight = order.max_in_flight
        if order.admission != state.admission:
            state.admission = order.admission
            state.changed()
        if order.abort_in_flight:
            self._abort()
        return self._reply()

    def _begin_stop(self, order: shim_pb2.StopEngine) -> Answer:
        if not 0 <= order.grace_s <= MAX_GRACE_S:
            return _error(400, f"graceS {order.grace_s} is not between 0 and {MAX_GRACE_S:g}")
        if self._state.process != ENDED:
            self._stop(order.grace_s)
        return self._reply()

    def _quit(self) -> Answer:
        if self._state.process != ENDED:
            return _error(409, "the engine still runs; stop it first", "ENGINE_RUNNING")
        self._leave()
        return self._reply()

    def _reply(self) -> Reply:
        body = json_format.MessageToJson(self._state.status(), indent=None).encode()
        return Reply(200, ((b"content-type", b"application/json"),), body)


def _parse(request: Request, message: M) -> M:
    return json_format.Parse(request.body or b"{}", message, ignore_unknown_fields=True)


def _error(status: int, message: str, code: str = "INVALID_ARGUMENT") -> Reply:
    return error_reply(status, message, "invalid_request_error", code.lower())
