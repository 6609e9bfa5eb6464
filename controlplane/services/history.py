"""Events as they happen: what is recorded already (at most the newest 10,000), then every commit, without a gap and
without a double."""

import asyncio
from collections.abc import AsyncIterator

from controlplane.loops.hub import Hub
from controlplane.store.store import Change, Compacted, Store
from springtide.errors import Unavailable
from springtide.model.record import Event

_BATCH = 10_000


async def follow_events(store: Store, hub: Hub, pool: str, after_event_id: int | None) -> AsyncIterator[Event]:
    """Events of the pool (all pools when empty) after an id, or from now on. Ends when the control plane stops."""
    last = after_event_id if after_event_id is not None else await _newest(store)
    while True:
        revision = (await store.snapshot()).revision
        for event in await store.events("", _BATCH, last):
            last = event.event_id
            if pool in ("", event.pool):
                yield event
        try:
            async for change in _until_closing(store.watch(revision), hub):
                for event in change.events:
                    if event.event_id > last:
                        last = event.event_id
                        if pool in ("", event.pool):
                            yield event
        except Compacted:
            continue  # too slow for the watch: read on from the history
        raise Unavailable("the control plane stops.", reason="STOPPING", retry_after_s=1.0)


async def _newest(store: Store) -> int:
    newest = await store.events("", 1)
    return newest[-1].event_id if newest else 0


async def _until_closing(changes: AsyncIterator[Change], hub: Hub) -> AsyncIterator[Change]:
    closed = asyncio.create_task(hub.wait_closing())
    try:
        while True:
            coming = asyncio.ensure_future(anext(changes))
            try:
                await asyncio.wait({coming, closed}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                yield coming.result()
            finally:
                coming.cancel()
    finally:
        closed.cancel()
