"""The Python client, asyncio and blocking, against the same fakes."""

import pytest

from springtide.client import AsyncSpringtide, Finished, Springtide, Started, Tokens
from springtide.errors import FailedPrecondition, NotFound, Unavailable


def test_blocking_client(stack):
    with Springtide(*stack.addresses) as springtide:
        assert [pool.spec.name for pool in springtide.pools()] == ["demo"]
        assert springtide.scale("demo", 2).status.desired_workers == 2
        kinds = [type(event) for event in springtide.generate("demo", chat="hi")]
        assert kinds == [Started, Tokens, Tokens, Finished]
        assert springtide.text("demo", "hi") == "Paris"
        assert [event.event_id for event in springtide.watch_events(after_event_id=2)] == [3]
        assert springtide.health(router=True) == "SERVING"
        with pytest.raises(NotFound) as caught:
            springtide.worker("nosuch")
        assert caught.value.reason == "WORKER_NOT_FOUND"
        with pytest.raises(FailedPrecondition):
            springtide.undrain("demo-1")
    springtide.close()  # twice is fine


def test_leaving_a_generation_is_fine(stack):
    with Springtide(*stack.addresses) as springtide:
        events = springtide.generate("demo", "hi")
        assert isinstance(next(events), Started)
        events.close()
        assert springtide.text("demo", "hi") == "Paris"


async def test_asyncio_client(stack):
    async with AsyncSpringtide(*stack.addresses) as springtide:
        pool, created = await springtide.apply({"name": "x", "engine": "sim", "policy": "static"})
        assert (pool.spec.policy.name, created) == ("static", True)
        assert (await springtide.metrics()).total_capacity == 8
        assert (await springtide.summary()).active_instances == 1
        assert await springtide.text("demo", token_ids=[1, 2], extra={"guided": {"a": 1}}) == "Paris"
        assert list(stack.router.asked[-1].token_ids.ids) == [1, 2]
        assert stack.router.asked[-1].sampling.extra["guided"]["a"] == 1


async def test_addresses_from_the_environment(monkeypatch):
    """CM5."""
    monkeypatch.setenv("SPRINGTIDE_ADDRESS", "127.0.0.1:9")
    monkeypatch.delenv("SPRINGTIDE_ROUTER", raising=False)
    async with AsyncSpringtide() as springtide:
        assert (springtide.address, springtide.router) == ("127.0.0.1:9", "127.0.0.1:7500")
        with pytest.raises(Unavailable) as caught:
            await springtide.pools()
    assert caught.value.reason == "CONTROL_PLANE_UNREACHABLE"
