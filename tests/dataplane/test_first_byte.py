"""When a route is told that its upstream has begun to answer."""

import pytest

from springtide.dataplane import Route
from tests.dataplane.fakes import Recorder, client, post, relay, says, stream_of, upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\n"
CHUNKED = b"HTTP/1.1 502 Bad Gateway\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((stream_of(3),), 1),
        ((OK + b"body",), 1),
        ((OK, b"bo", b"dy"), 1),
        ((b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nbody",), 1),  # the client's fault
        ((BROKEN + b"body",), 0),
        ((BROKEN, b"bo", b"dy"), 0),
        ((CHUNKED, b"4\r\nbody\r\n", b"0\r\n\r\n"), 0),
    ],
)
async def test_an_error_of_the_upstream_is_no_sign_of_health(answer: tuple[bytes, ...], told: int) -> None:
    """F11: a broken worker that answers 500 to the request that probes it stays broken."""
    times: list[float] = []
    async with upstream(says(*answer)) as up:
        director = Recorder(lambda r: Route(up.address, on_first_byte=times.append))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post(extra=b"connection: close\r\n"))
            await c.rest()
    assert len(times) == told
