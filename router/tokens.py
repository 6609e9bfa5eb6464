"""The HTTP front's door: a bearer token for everything but probes, where the router has tokens at all."""

from collections.abc import Awaitable

from router.http_front import as_reply
from springtide.dataplane import Answer, Director, Outcome, Reply, Request, Retry
from springtide.rpc.fronted import Authorize

_OPEN = frozenset(("/health", "/healthz", "/ready"))


class Guarded:
    """A director in front of another one. The token is the router's own: no worker sees it."""

    def __init__(self, director: Director, authorize: Authorize) -> None:
        self._director = director
        self._authorize = authorize

    def direct(self, request: Request) -> Answer | Awaitable[Answer]:
        """Refuses with 401, or asks the director behind it."""
        if request.path not in _OPEN:
            error = self._authorize(request.header(b"authorization"))
            if error is not None:
                reply = as_reply(error)
                return Reply(reply.status, (*reply.headers, (b"www-authenticate", b"Bearer")), reply.body)
            request.headers = [(name, value) for name, value in request.headers if name != b"authorization"]
        return self._director.direct(request)

    def finished(self, request: Request, outcome: Outcome) -> Retry | None:
        """As the director behind it says."""
        return self._director.finished(request, outcome)
