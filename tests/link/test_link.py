"""The link end to end: what goes over it is what would go over a connection of its own."""

from springtide.dataplane import OutcomeKind
from tests.dataplane.fakes import client, post, says, stream_of, until, upstream
from tests.link.chain import chain, ended


async def test_streams_share_one_connection_once_it_is_offered() -> None:
    """RT1 RT5: the first answer offers the link; from then on requests and their streams go over it, byte for byte."""
    async with upstream(says(stream_of(5))) as engine, chain(engine) as c:
        await c.linked()
        for _ in range(3):
            async with client(c.port) as one:
                one.send(post())
                answer = await ended(one)
                assert answer.endswith(b'data: {"i": 4}\n\ndata: [DONE]\n\n')
                assert b"upgrade" not in answer.lower()
        assert c.over_link == [False, True, True, True]
        assert [o.kind for o in c.outcomes] == [OutcomeKind.OK] * 4
        await until(lambda: len(c.ended) == 4)
        assert [o.kind for o in c.ended] == [OutcomeKind.OK] * 4
