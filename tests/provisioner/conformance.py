"""What every provider does, as checks that a provider's own tests run against the real thing.

    class MyRig(Rig):
        set_name = "std"                       # of a set whose cap is MyRig.most nodes
        async def open(self): ...              # a provider, as a new process of the same id makes it
        async def real(self): ...              # how many nodes really are there, asked behind the provider's back

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check, my_rig):
        await check(my_rig)

A rig begins empty. Its fixture ends what a failed check leaves behind.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import pytest

from provisioner.core.provider import GroupOrder, OutcomeUnknown, Phase, ProvidedNode, Provider, Refused
from springtide.model.provisioning import ProvisionerReport
from springtide.wire.provisioner import report_from_proto, report_to_proto

TOKEN = "stj1.not-to-be-seen." + "x" * 20


class Rig(ABC):
    """One provider with its world."""

    set_name = "std"
    most = 2  # nodes of the set
    unit = 1  # nodes of a group
    bound_s = 30.0  # longest wait for anything

    @abstractmethod
    async def open(self) -> Provider:
        """A provider on this world. Called again for a restart: it knows what is there from the world alone."""

    @abstractmethod
    async def real(self) -> int:
        """Nodes that are there or coming, asked behind the provider's back."""

    async def cut(self) -> bool:
        """Makes the provider's world unreachable, for the checks of unknown outcomes; False: it cannot be."""
        return False

    async def mend(self) -> None:
        """Ends `cut`."""
        raise NotImplementedError("a rig that can be cut can be mended")

    def order(self, group_id: str = "") -> GroupOrder:
        group_id = group_id or f"c-{self.set_name}-{secrets.token_hex(4)}"
        ids = (group_id,) if self.unit == 1 else tuple(f"{group_id}-{n}" for n in range(self.unit))
        return GroupOrder(group_id, self.set_name, ids, join_token=TOKEN)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        async def wait() -> None:
            while not await condition():
                await asyncio.sleep(0.05)

        try:
            async with asyncio.timeout(self.bound_s):
                await wait()
        except TimeoutError:
            pytest.fail(f"not within {self.bound_s:g} s: {what}")


async def _nodes(provider: Provider, order: GroupOrder) -> list[ProvidedNode]:
    return [node for node in await provider.list() if node.group_id == order.group_id]


async def _alive(provider: Provider, order: GroupOrder) -> list[ProvidedNode]:
    return [node for node in await _nodes(provider, order) if node.phase in (Phase.PENDING, Phase.RUNNING)]


async def _started(rig: Rig, provider: Provider, order: GroupOrder) -> None:
    await provider.start(order)
    await rig.until(lambda: _all_alive(provider, order), f"{order.node_ids} listed as alive")

    async def really() -> bool:
        return await rig.real() >= rig.unit

    await rig.until(really, f"{order.node_ids} really there: one may be listed a moment before")


async def _all_alive(provider: Provider, order: GroupOrder) -> bool:
    return {node.node_id for node in await _alive(provider, order)} == set(order.node_ids)


async def _gone(provider: Provider, order: GroupOrder) -> bool:
    return all(node.phase is Phase.ENDED for node in await _nodes(provider, order))


async def _stop(rig: Rig, provider: Provider, order: GroupOrder) -> None:
    await provider.stop(order.group_id, order.node_ids)
    await rig.until(lambda: _gone(provider, order), f"{order.node_ids} ended")

    async def none_real() -> bool:
        return await rig.real() == 0

    await rig.until(none_real, "nothing really there")


async def _refusal(call: Awaitable[None]) -> str:
    try:
        await call
    except Refused as refused:
        return refused.status
    return ""


# ------------------------------------------------------------------ checks


async def tells_its_sets(rig: Rig) -> None:
    """PV1: sets cross the wire as they are; the cap is what the rig says."""
    provider = await rig.open()
    sets = tuple(await provider.capability_sets())
    report = ProvisionerReport(capability_sets=sets)
    assert report_from_proto(report_to_proto(report)).capability_sets == sets
    found = next(kind for kind in sets if kind.name == rig.set_name)
    assert (found.max_nodes, found.nodes_per_unit) == (rig.most, rig.unit)
    await provider.close()


async def gives_and_takes_back(rig: Rig) -> None:
    """PV1: a group is started, listed by the names of the order, stopped, and nothing is left."""
    provider = await rig.open()
    order = rig.order()
    await _started(rig, provider, order)
    listed = await _nodes(provider, order)
    assert {(node.node_id, node.capability_set) for node in listed} == {(n, rig.set_name) for n in order.node_ids}
    assert await rig.real() == rig.unit
    await _stop(rig, provider, order)
    await provider.close()


async def starts_once_however_often_it_is_told(rig: Rig) -> None:
    """CP15: the same order is the same group: one after another, and at the same time."""
    provider = await rig.open()
    order = rig.order()
    results = await asyncio.gather(provider.start(order), provider.start(order), return_exceptions=True)
    assert not [r for r in results if isinstance(r, BaseException) and not isinstance(r, Refused | OutcomeUnknown)]
    await _started(rig, provider, order)
    await provider.start(order)
    assert len(await _nodes(provider, order)) == rig.unit
    assert await rig.real() == rig.unit
    await _stop(rig, provider, order)
    await provider.close()


async def stops_as_often_as_it_is_told(rig: Rig) -> None:
    """CP15: a second stop is no error, or says that there is no such group any more."""
    provider = await rig.open()
    order = rig.order()
    await _started(rig, provider, order)
    await provider.stop(order.group_id, order.node_ids)
    said = [await _refusal(provider.stop(order.group_id, order.node_ids)) for _ in range(2)]
    assert set(said) <= {"", "WORKER_GROUP_ID_NOT_FOUND", "WORKER_GROUP_SHUTDOWN"}
    await rig.until(lambda: _gone(provider, order), "ended")
    await provider.close()


async def does_not_know_other_groups(rig: Rig) -> None:
    """CP15: WORKER_GROUP_ID_NOT_FOUND, and nothing happens."""
    provider = await rig.open()
    with pytest.raises(Refused) as refused:
        await provider.stop("never-heard-of", ("never-heard-of",))
    assert refused.value.status == "WORKER_GROUP_ID_NOT_FOUND"
    await provider.close()


async def refuses_sets_that_it_does_not_have(rig: Rig) -> None:
    """CP15: WORKER_GROUP_TOO_MUCH, and nothing is started."""
    provider = await rig.open()
    with pytest.raises(Refused) as refused:
        await provider.start(GroupOrder("g-unknown", "no-such-set", ("g-unknown",)))
    assert refused.value.status == "WORKER_GROUP_TOO_MUCH"
    assert await rig.real() == 0
    await provider.close()


async def finds_its_nodes_again(rig: Rig) -> None:
    """CP10: another process of the same id lists what the first one gave, does not start it again, and stops it."""
    first = await rig.open()
    order = rig.order()
    await _started(rig, first, order)
    await first.close()
    assert await rig.real() == rig.unit, "nodes outlive the process"
    second = await rig.open()
    await rig.until(lambda: _all_alive(second, order), "found again")
    await second.start(order)
    assert await rig.real() == rig.unit
    await _stop(rig, second, order)
    await second.close()


async def keeps_its_secrets(rig: Rig) -> None:
    """Rule 13: the join token is in nothing that is listed."""
    provider = await rig.open()
    order = rig.order()
    await _started(rig, provider, order)
    assert TOKEN not in repr(await provider.list())
    assert TOKEN not in repr(order)
    await _stop(rig, provider, order)
    await provider.close()


async def does_not_take_silence_for_absence(rig: Rig) -> None:
    """PV1: while its world does not answer, `list` raises; afterwards what runs is listed as before."""
    provider = await rig.open()
    order = rig.order()
    await _started(rig, provider, order)
    if await rig.cut():
        with pytest.raises(OutcomeUnknown):
            await provider.list()
        await rig.mend()
    await rig.until(lambda: _all_alive(provider, order), "listed again")
    await _stop(rig, provider, order)
    await provider.close()


CHECKS = (
    tells_its_sets,
    gives_and_takes_back,
    starts_once_however_often_it_is_told,
    stops_as_often_as_it_is_told,
    does_not_know_other_groups,
    refuses_sets_that_it_does_not_have,
    finds_its_nodes_again,
    keeps_its_secrets,
    does_not_take_silence_for_absence,
)
