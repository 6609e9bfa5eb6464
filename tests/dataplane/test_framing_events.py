"""Framing and event borders: whatever the cuts, the same payload and the same whole events in order."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.dataplane.events import EventStream, event_data, is_plain_chunk, split_events
from springtide.dataplane.framing import ChunkedBody, FramingError, LengthBody, chunk

EVENTS = st.lists(
    st.sampled_from(
        [
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
            b'data: {"choices":[{"delta":{"content":"an error: [DONE] \\"error\\""}}]}\n\n',
            b'data: {"t": 1}\r\n\r\n',
            b": ping\n\n",
            b": ping\r\n\r\n",
            b"event: message\ndata: 1\ndata: 2\n\n",
            b"id: 7\r\ndata: x\r\n\r\n",
            "data: schöne Grüße ☃\n\n".encode(),
        ]
    ),
    max_size=12,
)


def cuts(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def is_counted(event: bytes) -> bool:
    return not event.startswith(b":")


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 5000), max_size=40), st.sampled_from([b"data: [DONE]\n\n", b""]))
def test_any_cut_gives_whole_events_in_order(events: list[bytes], points: list[int], done: bytes) -> None:
    stream = EventStream(10_000)
    given_out = []
    for piece in cuts(b"".join(events) + done, points):
        out = stream.feed(piece)
        assert not out or out.endswith((b"\n\n", b"\n\r\n"))
        given_out.append(out)
    assert b"".join(given_out) == b"".join(events) + done
    assert stream.count == sum(map(is_counted, events))
    assert stream.done is bool(done)
    assert stream.error is None
    assert not stream.partial


@settings(max_examples=150, deadline=None)
@given(
    EVENTS,
    st.sampled_from(
        [
            b'data: {"error": {"message": "engine died"}}\n\n',
            b'data:{"error":{"message": "engine died"}}\r\n\r\n',
            b'error: {"message": "engine died"}\n\n',
            b'event: error\ndata: {"message": "engine died"}\n\n',
        ]
    ),
    st.lists(st.integers(0, 5000), max_size=20),
)
def test_an_error_event_ends_the_stream_before_done(events: list[bytes], error: bytes, points: list[int]) -> None:
    """F-rows of a killed rank: HTTP 200, an error event, then [DONE] that must not pass."""
    stream = EventStream(10_000)
    data = b"".join(events) + error + b"data: [DONE]\n\n"
    out = b"".join(stream.feed(piece) for piece in cuts(data, points))
    assert out == b"".join(events)
    assert stream.error == error
    assert not stream.done


def test_a_null_error_field_is_no_error() -> None:
    stream = EventStream(1000)
    assert stream.feed(b'data: {"error": null, "x": 1}\n\n')
    assert stream.error is None


def test_event_too_long() -> None:
    stream = EventStream(10)
    with pytest.raises(ValueError, match="longer than 10"):
        stream.feed(b"data: 0123456789")


def test_event_data_joins_lines() -> None:
    assert [event_data(e) for e in split_events(b"data: a\ndata:b\n\nid: 1\r\ndata: c\r\n\r\n")] == [b"a\nb", b"c"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.sampled_from([b"0\r\n\r\n", b"0;x=y\r\n\r\n", b"0\r\nx: y\r\nz: 1\r\n\r\n"]),
    st.lists(st.integers(0, 1000), max_size=30),
    st.binary(max_size=5),
)
def test_chunked_body_any_cut(pieces: list[bytes], last: bytes, points: list[int], rest: bytes) -> None:
    body = ChunkedBody()
    payload = b""
    data = b"".join(map(chunk, pieces)) + last
    for piece in cuts(data, points):
        assert not body.done
        got = body.feed(piece)
        payload += got
        if body.aligned and not body.done:
            assert piece.endswith(b"\r\n")
            assert ChunkedBody().feed(piece) == got
    assert body.done
    assert payload == b"".join(pieces)
    again = ChunkedBody()
    again.feed(data + rest)
    assert (again.done, again.rest) == (True, rest)


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\nab\r\n",
        b"-1\r\n",
        b"0x2\r\nab\r\n",
        b"1_0\r\n",
        b"+2\r\nab\r\n",
        b"\r\n",
        b"2\r\nabc\r\n",
        b" 2\r\nab\r\n",
        b"f" * 17 + b"\r\n",
        b"1" * 2000,
    ],
)
def test_bad_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkedBody().feed(data)


def test_trailers_are_bounded() -> None:
    body = ChunkedBody()
    body.feed(b"0\r\n")
    with pytest.raises(FramingError):
        body.feed((b"a: " + b"b" * 500 + b"\r\n") * 100)


def test_length_body_keeps_what_follows() -> None:
    body = LengthBody(3)
    assert body.feed(b"ab") == b"ab"
    assert not body.done
    assert body.feed(b"cde") == b"c"
    assert (body.done, body.rest) == (True, b"de")


def test_a_plain_chunk_is_what_the_closer_look_says() -> None:
    """RT5: wherever the short look says yes, the long one finds one aligned chunk with one event and nothing else."""
    rng = random.Random(3)
    pieces = [
        b"data: x",
        b'data: {"x',
        b'data: {"error": {}}\n\n',
        b'data: {"error": null}\n\n',
        b"\n",
        b"\n\n",
        b"\r\n",
        b"error",
        b"data: [DONE]",
        b":",
        b"5\r\n",
        b"\x00",
        b'data: {"a": 1}\n\n',
    ]
    yes = 0
    for _ in range(40_000):
        payload = b"".join(rng.choice(pieces) for _ in range(rng.randint(1, 4)))
        data = b"%x\r\n%b\r\n" % (len(payload) + rng.choice((0, 0, 0, 1, -1)), payload)
        if rng.random() < 0.1:
            data = data[: rng.randint(1, len(data))]
        if not is_plain_chunk(data):
            continue
        yes += 1
        body, scan = ChunkedBody(), EventStream(1024)
        found = body.feed(data)
        assert (found, body.aligned, body.done) == (payload, True, False)
        assert (scan.feed(found) is found, scan.count, scan.error, scan.done) == (True, 1, None, False)
    assert yes > 500
    assert not is_plain_chunk(b"0\r\n\r\n")
    assert not is_plain_chunk(b"a")
