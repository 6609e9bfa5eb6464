"""Heads that were read before: what a second one with the same bytes says, and what must never be taken for known."""

import random

import pytest

from springtide.dataplane.heads import (
    CHUNKED,
    UNTIL_CLOSE,
    HeadError,
    RequestHead,
    RequestHeads,
    ResponseHead,
    ResponseHeads,
    encode_request,
    encode_response_head,
    parse_request_head,
    parse_response_head,
)
from springtide.dataplane.messages import Request, Route, TcpAddress

POST = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: t\r\nX-Session-Id: s1\r\nContent-Length: 17\r\nAccept: */*\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 5\r\n\r\n"


def look(heads: RequestHeads, head: bytes) -> tuple[RequestHead, int]:
    known, length = heads.find(head)
    if known is None:
        known = heads.read(head)
        length = known.length
    return known, length


def look_up(heads: ResponseHeads, head: bytes) -> tuple[ResponseHead, int]:
    known, length = heads.find(head)
    if known is None:
        known = heads.read(head)
        length = known.length
    return known, length


def test_only_the_digits_of_the_length_may_differ() -> None:
    """RT9: the same head with another length is known, and its length is its own; any other difference is read anew."""
    heads = RequestHeads(100)
    first, length = look(heads, POST)
    assert (first.method, first.path, first.query, length) == ("POST", "/v1/completions", "x=1", 17)
    again, length = heads.find(POST.replace(b": 17", b": 4711"))
    assert again is first
    assert length == 4711
    for other in (POST.replace(b"s1", b"s2"), POST.replace(b"POST", b"PUT"), POST.replace(b"Host: t", b"Host: u")):
        assert heads.find(other)[0] is None
    request = first.request("1.2.3.4:5", 7.0)
    assert request.extension_headers() == {b"x-session-id": b"s1"}
    assert all(name != b"content-length" for name, _ in request.headers)


@pytest.mark.parametrize(
    "bad",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\ncontent-length: 1",
        b"Content-Length: +1",
        b"Content-Length: 1, 1",
        b"Content-Length: ",
        b"Content-Length: 0x10",
        b"Content-Length: 1234567890123456",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 1",
    ],
)
def test_a_bad_length_is_refused_however_often_a_good_one_came(bad: bytes) -> None:
    """Smuggling: what the parser refuses is never found among what it took."""
    heads = RequestHeads(100)
    look(heads, POST)
    for _ in range(2):
        with pytest.raises(HeadError):
            look(heads, POST.replace(b"Content-Length: 17", bad))


def test_known_heads_say_what_the_parser_says() -> None:
    """Over thousands of heads in random forms and orders, found or not, the answer is the parser's."""
    rng = random.Random(7)
    requests, answers = RequestHeads(100), ResponseHeads()
    found = 0
    for _ in range(4_000):
        lines = [
            rng.choice((b"Content-Length: %d", b"content-length: %d", b"CONTENT-LENGTH:%d")) % rng.randint(0, 99),
            rng.choice((b"Connection: close", b"Connection: keep-alive", b"X-Content-Length: 3", b"A: b")),
        ]
        rng.shuffle(lines)
        tail = b"\r\n".join(lines) + b"\r\n\r\n"
        head = b"POST /%d HTTP/1.1\r\nhost: t\r\n" % rng.randint(0, 2) + tail
        found += requests.find(head)[0] is not None
        known, length = look(requests, head)
        read = parse_request_head(head, 100)
        assert (known.target, known.keep_alive, known.headers, length) == (
            (read.target, read.keep_alive, read.headers, read.length)
        )
        status = rng.choice((b"200 OK", b"503 Busy", b"204 None", b"304 Same"))
        framing = rng.choice((b"", b"Transfer-Encoding: chunked\r\n"))
        head = b"HTTP/1.1 " + status + b"\r\n" + framing + tail
        try:
            plain = parse_response_head(head)
        except HeadError:  # a length beside chunks
            with pytest.raises(HeadError):
                look_up(answers, head)
            continue
        answer, length = look_up(answers, head)
        assert (answer.status, answer.keep_alive, length) == (plain.status, plain.keep_alive, plain.length)
        assert [name for name, _ in answer.headers] == [name for name, _ in plain.headers]
    assert found > 2_000


def test_other_ends_of_a_body() -> None:
    """A known head without a length keeps saying how its body ends."""
    answers = ResponseHeads()
    for head, length in (
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", CHUNKED),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", UNTIL_CLOSE),
    ):
        for _ in range(2):
            assert look_up(answers, head)[1] == length


def test_what_is_kept_is_bounded() -> None:
    """Clients that never send the same head twice gain nothing and cost no memory."""
    heads = RequestHeads(100)
    for number in range(2_000):
        look(heads, POST.replace(b"s1", b"%d" % number))
    assert len(heads._known) <= 512
    long = POST.replace(b"s1", b"x" * 8_000)
    look(heads, long)
    assert heads.find(long)[0] is None


def test_kept_lines_are_those_of_the_route() -> None:
    """One head goes out with the fields of each of its routes; changed headers are not taken for the kept ones."""
    known, _ = look(RequestHeads(100), POST)
    request = known.request("c", 0.0)
    address = TcpAddress("127.0.0.1", 9)
    plain = encode_request(request, Route(address))
    assert b"x-session-id: s1\r\n" in plain
    own = encode_request(request, Route(address, ((b"x-session-id", b"mine"),)))
    assert own.count(b"x-session-id") == 1
    assert b"x-session-id: mine\r\n" in own
    assert encode_request(request, Route(address)) == plain
    request.headers = [(b"x-other", b"1")]
    changed = encode_request(request, Route(address))
    assert b"x-session-id" not in changed
    assert b"x-other: 1\r\n" in changed
    assert request.extension_headers() == {b"x-other": b"1"}
    as_read = Request("POST", "/v1/completions?x=1", [(b"x-session-id", b"s1"), (b"accept", b"*/*")])
    assert encode_request(as_read, Route(address)) == plain


def test_an_answers_lines_go_out_with_each_routes_fields() -> None:
    """The same for answers: a route's field replaces the upstream's, for this request only."""
    head = parse_response_head(ANSWER.replace(b"content-type", b"x-request-id: theirs\r\ncontent-type"))
    ours = encode_response_head(head, ((b"x-request-id", b"ours"),), b"content-length: 5\r\n", True)
    assert ours.count(b"x-request-id") == 1
    assert b"x-request-id: ours\r\n" in ours
    theirs = encode_response_head(head, (), b"content-length: 5\r\n", False)
    assert b"x-request-id: theirs\r\n" in theirs
    assert theirs.endswith(b"connection: close\r\n\r\n")
