"""One contract for every store; what is special about sqlite is in test_sqlite.py."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from controlplane.core.snapshot import Delete, Put
from controlplane.store.memory import MemoryStore
from controlplane.store.sqlite import SqliteStore
from controlplane.store.store import Change, Compacted, Compare, Store
from springtide.errors import Conflict, Exhausted
from springtide.model.enums import DecisionResult, DrainAction, Phase, ReportedPhase, State
from springtide.model.node import Gpu, Node, NodeObserved, NodeSpec
from springtide.model.pool import PolicySpec, Pool, PoolIntent, PoolSpec
from springtide.model.record import Decision, Event
from springtide.model.worker import ExitInfo, Worker, WorkerIntent, WorkerObserved

POOL = Pool(
    PoolSpec(
        "chat", "sim", policy=PolicySpec("load_ratio", {"cooldown": 1.5, "on": True}), drain_action=DrainAction.WAIT
    ),
    PoolIntent(desired_workers=2, manual_workers=2, hold_until=9.5, conditions=("CANNOT_PLACE: x.",)),
)
NODE = Node("n1", spec=NodeSpec(True, "why"), observed=NodeObserved("b", "h", (Gpu("0", memory_bytes=1),), {"a": "b"}))
WORKER = Worker(
    "chat-1",
    "chat",
    WorkerIntent(state=State.DRAINING, phase=Phase.FINISHING, gpu_ids=("0", "1"), deadline=1.25),
    WorkerObserved(incarnation=5, phase=ReportedPhase.DRAINING, exit=ExitInfo(signal=9, reason="ENGINE_KILLED")),
)


def decision(pool: str = "chat", result: DecisionResult = DecisionResult.SCALE_UP, **changes: object) -> Decision:
    made = Decision(pool, 1.0, "load_ratio", result, 1, 2, "OVER", "m", {"in_flight": None, "ratio": 0.5}, ("w",))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def event(action: str, pool: str = "chat") -> Event:
    return Event(1.0, action, "chat-1", "starting", pool)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, tmp_path) -> AsyncIterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore(changes_kept=5)
    else:
        made = SqliteStore(tmp_path, changes_kept=5)
    await made.open()
    yield made
    await made.close()


async def test_records_come_back_as_they_were_written(store: Store) -> None:
    """CP10: every part of every record."""
    committed = await store.commit(
        [Compare("pool", "chat", 0)], [Put(POOL), Put(NODE), Put(WORKER)], [decision()], [event("scale_up_start")]
    )
    records = await store.snapshot()
    assert records.revision == committed.revision == 1
    assert records.store_id == await store.open() if isinstance(store, MemoryStore) else records.store_id
    assert records.pools == {"chat": dataclasses.replace(POOL, revision=1)}
    assert records.nodes == {"n1": dataclasses.replace(NODE, revision=1)}
    assert records.workers == {"chat-1": dataclasses.replace(WORKER, revision=1)}


async def test_a_commit_is_refused_whole_when_a_compared_record_has_moved(store: Store) -> None:
    await store.commit([Compare("pool", "chat", 0)], [Put(POOL)])
    for stale in (Compare("pool", "chat", 0), Compare("pool", "chat", 9), Compare("worker", "chat-1", 1)):
        with pytest.raises(Conflict):
            await store.commit([stale], [Put(NODE), Delete("pool", "chat")], [decision()], [event("x")])
    records = await store.snapshot()
    assert (records.revision, list(records.pools), list(records.nodes)) == (1, ["chat"], [])
    assert await store.decisions() == ()
    assert await store.events() == ()
    await store.commit([Compare("pool", "chat", 1)], [Delete("pool", "chat")])
    assert (await store.snapshot()).pools == {}
    await store.commit([Compare("pool", "chat", 0)], [Put(POOL)])


async def test_a_snapshot_never_changes(store: Store) -> None:
    await store.commit([], [Put(POOL)])
    before = await store.snapshot()
    await store.commit([], [Put(WORKER), Delete("pool", "chat")])
    assert (before.revision, list(before.pools), list(before.workers)) == (1, ["chat"], [])


async def test_concurrent_writers_of_one_record_win_once(store: Store) -> None:
    async def attempt(number: int) -> bool:
        try:
            await store.commit([Compare("pool", "chat", 0)], [Put(POOL)], [], [event(str(number))])
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*(attempt(number) for number in range(8)))) == 1
    assert len(await store.events()) == 1


async def test_a_commit_has_at_most_a_hundred_operations(store: Store) -> None:
    writes = [Put(dataclasses.replace(WORKER, worker_id=f"w-{number}")) for number in range(100)]
    with pytest.raises(Exhausted):
        await store.commit([], writes, [decision()])
    await store.commit([], writes)
    assert len((await store.snapshot()).workers) == 100


async def test_decisions_are_listed_newest_first_and_a_standing_one_grows(store: Store) -> None:
    """PL14: a repeated standing request is logged once."""
    hold = (await store.commit([], [], [decision(result=DecisionResult.HOLD)])).decisions[0]
    up = (await store.commit([], [], [decision(), decision("other")])).decisions
    grown = dataclasses.replace(hold, count=7, last_at=9.0)
    assert (await store.commit([], [], [grown])).decisions[0].decision_id == hold.decision_id
    listed = await store.decisions()
    assert [entry.decision_id for entry in listed] == [up[1].decision_id, up[0].decision_id, hold.decision_id]
    assert (listed[-1].count, listed[-1].last_at) == (7, 9.0)
    assert [entry.result for entry in await store.decisions("chat", skip_holds=True)] == [DecisionResult.SCALE_UP]
    assert len(await store.decisions(limit=2)) == 2


async def test_events_are_listed_oldest_first_of_the_newest(store: Store) -> None:
    """CM6: the order of events is the order in which they happened."""
    for number in range(5):
        await store.commit([], [], [], [event(f"a{number}"), event(f"b{number}", "other")])
    assert [entry.action for entry in await store.events("chat", limit=3)] == ["a2", "a3", "a4"]
    everything = await store.events()
    ids = [entry.event_id for entry in everything]
    assert ids == sorted(set(ids))
    assert [entry.action for entry in await store.events(after_event_id=ids[-3])] == ["a4", "b4"]
    assert everything[-1].revision == 5


async def take(store: Store, after: int, count: int) -> list[Change]:
    found: list[Change] = []
    async for change in store.watch(after):
        found.append(change)
        if len(found) == count:
            break
    return found


async def test_a_watch_shows_every_commit_in_order(store: Store) -> None:
    """CP18: resumes from a revision."""
    watching = asyncio.create_task(take(store, 0, 3))
    await asyncio.sleep(0)
    await store.commit([], [Put(POOL)], [], [event("x")])
    await store.commit([], [Put(WORKER)])
    await store.commit([], [Delete("pool", "chat")])
    changes = await asyncio.wait_for(watching, 5)
    assert [change.revision for change in changes] == [1, 2, 3]
    assert changes[0].writes == (Put(dataclasses.replace(POOL, revision=1)),)
    assert changes[0].events[0].event_id == 1
    assert changes[2].writes == (Delete("pool", "chat"),)
    assert [change.revision for change in await take(store, 1, 2)] == [2, 3]


async def test_a_compacted_or_future_watch_says_so(store: Store) -> None:
    """DESIGN 3: a compacted watch means a new snapshot."""
    for _ in range(8):
        await store.commit([], [Put(POOL)])
    for after in (0, 2, 9):
        with pytest.raises(Compacted):
            await take(store, after, 1)
    assert [change.revision for change in await take(store, 3, 5)] == [4, 5, 6, 7, 8]


async def test_a_cancelled_writer_leaves_the_store_whole(store: Store) -> None:
    """The commit happens or not; what a later reader sees is what a later commit compares with."""

    async def write() -> None:
        await store.commit([Compare("pool", "chat", 0)], [Put(POOL)])

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settle(lambda: at_revision(store, 1) if isinstance(store, SqliteStore) else always())
    records = await store.snapshot()
    await store.commit([Compare("pool", "chat", records.revision_of("pool", "chat"))], [Put(POOL)])


async def at_revision(store: Store, revision: int) -> bool:
    return (await store.snapshot()).revision == revision


async def always() -> bool:
    return True


async def settle(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not settle in 5 s")
