"""A director that ends an attempt which waits for nothing any more, and the client that does so."""

import asyncio
from collections.abc import Callable

import pytest

from springtide.dataplane import Limits, OutcomeKind, Retry, Route, UpstreamPool
from springtide.dataplane.client import UpstreamFailure, call
from tests.dataplane.fakes import DONE, Peer, Recorder, client, event, post, relay, says, stream_of, until, upstream


async def silent(peer: Peer) -> None:
    await peer.closed()


async def test_an_attempt_that_is_cut_goes_elsewhere_unseen() -> None:
    """F40: nothing was sent to the client; the connection is closed at once."""
    cuts: list[Callable[[], None]] = []
    async with upstream(silent) as hanging, upstream(says(stream_of(1))) as other:
        first = Route(hanging.address, on_attempt=cuts.append)
        director = Recorder(lambda request: first, lambda outcome: Retry(Route(other.address)))
        async with relay(director) as (_, port), client(port) as c:
            c.send(post())
            await until(lambda: hanging.requests)
            cuts[0]()
            assert (await c.head()).startswith(b"HTTP/1.1 200")
            assert await c.chunks() == event(0) + DONE
            assert [outcome.kind for outcome in director.outcomes] == [OutcomeKind.ABORTED, OutcomeKind.OK]
            cuts[0]()  # it is over
            assert len(director.outcomes) == 2


@pytest.mark.parametrize("connected", [True, False])
async def test_a_clients_request_that_is_cut(connected: bool) -> None:
    """F40: also while it connects."""
    pool = UpstreamPool(Limits())
    async with upstream(silent) as hanging:
        asking = call("POST", Route(hanging.address), "/", b"{}", None, pool)

        async def ask() -> None:
            async with asking as answer:
                await answer.read()

        task = asyncio.create_task(ask())
        if connected:
            await until(lambda: hanging.requests)
        else:
            await asyncio.sleep(0)
        asking.cut()
        with pytest.raises(UpstreamFailure) as caught:
            await asyncio.wait_for(task, 10)
        assert caught.value.kind is OutcomeKind.ABORTED
        assert len(hanging.requests) == connected
    pool.close()
