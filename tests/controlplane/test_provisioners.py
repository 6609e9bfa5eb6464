"""ProvisionerService over real sockets: sessions, orders, rivals, answers that nobody knows, and who is let in."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest

from controlplane.assembly import ControlPlane
from controlplane.config import ControlPlaneConfig, NodeSettings
from controlplane.store.memory import MemoryStore
from springtide.clock import SystemClock
from springtide.errors import AlreadyExists, InvalidArgument, SpringtideError, Unauthenticated
from springtide.model.pool import PolicySpec
from springtide.rpc import ChannelSecurity, channel, decoded_errors
from springtide.v1 import agent_pb2, agent_pb2_grpc, types_pb2
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import controlplane_pb2_grpc as cp_grpc
from springtide.v1 import provisioner_pb2 as pb
from springtide.v1 import provisioner_pb2_grpc as pb_grpc
from tests.controlplane.harness import FAST, FakeAgent, operator, start_control, until

Request: TypeAlias = pb.ProvisionerServiceSessionRequest
Response: TypeAlias = pb.ProvisionerServiceSessionResponse
E = TypeVar("E")
RPC = Path(__file__).parents[1] / "rpc"
STD = pb.CapabilitySet(name="std", gpus_per_node=2, max_nodes=4)


class FakeProvisioner:
    """One session, by hand. `responses` keeps all that it was told."""

    def __init__(
        self, address: str, provisioner_id: str = "p1", session_id: str = "", security: ChannelSecurity | None = None
    ) -> None:
        self.provisioner_id = provisioner_id
        self.session_id = session_id or secrets.token_hex(4)
        self.responses: list[Response] = []
        self.error: SpringtideError | None = None
        self._address = address
        self._security = security
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeProvisioner":
        self.hello()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def hello(self) -> None:
        hello = pb.ProvisionerHello(provisioner_id=self.provisioner_id, session_id=self.session_id, kind="fake")
        self._outbox.put_nowait(Request(hello=hello))

    def report(self, *nodes: pb.ProvidedNode, sets: tuple[pb.CapabilitySet, ...] = (STD,), **fields: Any) -> None:
        self._outbox.put_nowait(Request(report=pb.ProvisionerReport(capability_sets=sets, nodes=nodes, **fields)))

    def goodbye(self) -> None:
        self._outbox.put_nowait(Request(goodbye=pb.ProvisionerGoodbye(reason="stops")))

    @property
    def last(self) -> Response:
        return self.responses[-1] if self.responses else Response()

    async def _requests(self) -> AsyncIterator[Request]:
        while True:
            yield await self._outbox.get()

    async def _run(self) -> None:
        try:
            with decoded_errors("control plane", self._address):
                async with channel(self._address, self._security or ChannelSecurity()) as ch:
                    async for response in pb_grpc.ProvisionerServiceStub(ch).Session(self._requests()):
                        self.responses.append(response)
        except SpringtideError as error:
            self.error = error


@pytest.fixture
async def control() -> AsyncIterator[tuple[ControlPlane, str]]:
    found, address = await start_control(nodes=NodeSettings(idle_s=0.3, register_timeout_s=5.0))
    yield found, address
    await found.stop()


async def told(ask: Callable[[], Awaitable[E]]) -> E:
    """What the server said. A client of grpc.aio whose call ends while it is still sending may see a broken connection
    instead, as agents and provisioners may; they, too, ask again."""
    for _ in range(20):
        error = await ask()
        if not isinstance(error, SpringtideError) or error.reason != "CONNECTION_LOST":
            return error
    return error


async def need(address: str, workers: int) -> None:
    """A pool of so many workers."""
    async with channel(address) as ch:
        spec = types_pb2.PoolSpec(name="demo", engine="sim", min_workers=workers, max_workers=9)
        spec.policy.name = PolicySpec("static").name
        await operator(ch).ApplyPool(cp.ApplyPoolRequest(spec=spec))


async def test_orders_follow_records_and_are_sent_again_with_each_report(control: tuple[ControlPlane, str]) -> None:
    """CP9, CP17: REQUESTED is recorded when the order arrives; the same order comes again; RUNNING ends it."""
    plane, address = control
    async with FakeProvisioner(address) as giver:
        giver.report()
        await need(address, 2)
        await until(lambda: giver.last.start, "a start")
        start = giver.last.start[0]
        assert plane.hub.snapshot.nodes[start.node_ids[0]].state.value == "REQUESTED"
        assert (giver.last.desired[0].desired, giver.last.desired[0].pending) == (1, 1)
        before = len(giver.responses)
        giver.report()
        await until(lambda: len(giver.responses) > before and giver.last.start, "the same again")
        assert giver.last.start[0] == start
        node = pb.ProvidedNode(
            node_id=start.node_ids[0],
            group_id=start.group_id,
            capability_set="std",
            phase=pb.PROVIDED_PHASE_RUNNING,
            reference="job 7",
        )
        giver.report(node)
        await until(lambda: not giver.last.start, "no start any more")
        async with FakeAgent(address, start.node_ids[0], gpus=2):
            await until(lambda: giver.last.desired and giver.last.desired[0].connected == 1, "connected")
            async with channel(address) as ch:
                status = await operator(ch).GetStatus(cp.GetStatusRequest())
            (shown,) = status.nodes
            assert (shown.provisioner_id, shown.capability_set, shown.reference) == ("p1", "std", "job 7")
            (provisioner,) = status.provisioners
            assert (provisioner.sets[0].desired, provisioner.sets[0].connected) == (1, 1)


async def test_what_nobody_knows_is_no_fault(control: tuple[ControlPlane, str]) -> None:
    """CP15, rule 14: statuses and phases of a later version end neither the session nor the server."""
    _, address = control
    async with FakeProvisioner(address) as giver:
        answer = pb.GroupAnswer(request_id="r", group_id="g")
        answer.status = 77  # type: ignore[assignment]
        odd = pb.ProvidedNode(node_id="odd", group_id="odd", capability_set="std")
        odd.phase = 55  # type: ignore[assignment]
        giver.report(odd, answers=[answer])
        await until(lambda: "odd" in giver.last.known_node_ids, "taken in as one that is there")
        before = len(giver.responses)
        giver.report(odd)
        await until(lambda: len(giver.responses) > before, "the session goes on")


async def test_one_process_for_each_id(control: tuple[ControlPlane, str]) -> None:
    """CP16: a second live process with the id is refused; the same one reconnects; another one takes over later."""
    _, address = control
    async with FakeProvisioner(address) as first:
        await until(lambda: first.responses, "an answer")

        async def rival() -> SpringtideError:
            heard = len(first.responses)
            first.report()
            await until(lambda: len(first.responses) > heard, "the first is heard")
            async with FakeProvisioner(address) as other:
                return await until(lambda: other.error, "a refusal")  # type: ignore[no-any-return]

        error = await told(rival)
        assert isinstance(error, AlreadyExists)
        assert error.reason == "PROVISIONER_ID_TAKEN"
        async with FakeProvisioner(address, session_id=first.session_id) as again:
            await until(lambda: again.responses, "the same process may connect again")
    async with FakeProvisioner(address) as heir:
        await until(lambda: heir.responses or heir.error, "an answer")
        assert heir.error is None


@pytest.mark.parametrize(
    ("kind", "field"),
    [("no hello", "message"), ("bad id", "hello.provisioner_id"), ("bad set", "capability_sets.name")],
)
async def test_bad_sessions_are_refused_by_name(control: tuple[ControlPlane, str], kind: str, field: str) -> None:
    """Rule 15: the error names the field."""
    _, address = control

    async def refusal() -> SpringtideError:
        giver = FakeProvisioner(address, "spaced out" if kind == "bad id" else "p1")
        if kind == "no hello":
            giver._outbox.put_nowait(Request(goodbye=pb.ProvisionerGoodbye()))
        async with giver:
            if kind == "bad set":
                giver.report(sets=(pb.CapabilitySet(name="NOT A NAME"),))
            return await until(lambda: giver.error, "a refusal")  # type: ignore[no-any-return]

    error = await told(refusal)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_a_report_without_a_hello_is_asked_to_register_again(control: tuple[ControlPlane, str]) -> None:
    """CP11."""
    _, address = control
    giver = FakeProvisioner(address)
    giver.report()
    async with giver:
        await until(lambda: giver.responses, "an answer")
        assert giver.responses[0].register_again
        await until(lambda: giver.last.store_id, "and served after the hello")


# ------------------------------------------------------------------ over a network


@pytest.fixture
async def networked(tmp_path: Path) -> AsyncIterator[tuple[ControlPlane, str]]:
    """Listens on all addresses, with TLS; nobody has a general token but operators."""
    (tmp_path / "tokens").write_text("operator\n")
    config = ControlPlaneConfig(
        listen="0.0.0.0:0",
        data_dir=str(tmp_path / "cp"),
        tls_cert=str(RPC / "localhost.pem"),
        tls_key=str(RPC / "localhost-key.pem"),
        token_file=str(tmp_path / "tokens"),
        timing=FAST,
        stop_timeout_s=0.2,
    )
    plane = ControlPlane(MemoryStore(), config, SystemClock())
    address = await plane.start()
    yield plane, f"127.0.0.1:{address.rpartition(':')[2]}"
    await plane.stop()


def showing(token: str) -> ChannelSecurity:
    return ChannelSecurity(tls_ca=str(RPC / "localhost.pem"), token=token)


async def token_for(address: str, provisioner_id: str) -> str:
    async with channel(address, showing("operator")) as ch:
        made = await cp_grpc.ControlPlaneServiceStub(ch).CreateJoinToken(
            cp.CreateJoinTokenRequest(provisioner_id=provisioner_id)
        )
        return str(made.token)


async def refusal(address: str, provisioner_id: str, token: str) -> SpringtideError:
    async def once() -> SpringtideError:
        async with FakeProvisioner(address, provisioner_id, security=showing(token)) as giver:
            return await until(lambda: giver.error, "a refusal")  # type: ignore[no-any-return]

    return await told(once)


async def test_provisioners_come_in_with_their_own_token_only(networked: tuple[ControlPlane, str]) -> None:
    """Rule 13: missing, wrong, expired, another's: each refused by a reason of its own; the right one is let in."""
    plane, address = networked
    token = await token_for(address, "p1")
    tokens = plane._door.tokens
    assert tokens is not None
    cases = {
        "": "UNAUTHENTICATED",
        "guess": "UNAUTHENTICATED",
        "stj1.AAAA.BBBB": "BAD_JOIN_TOKEN",
        tokens.for_provisioner("p1", -1.0): "JOIN_TOKEN_EXPIRED",
        tokens.for_provisioner("p2", 60.0): "JOIN_TOKEN_OF_ANOTHER",
        tokens.for_nodes(["p1"], 60.0): "JOIN_TOKEN_OF_ANOTHER",
    }
    for shown, reason in cases.items():
        error = await refusal(address, "p1", shown)
        assert isinstance(error, Unauthenticated)
        assert error.reason == reason, (shown, str(error))
        assert not shown or shown not in str(error)
    async with FakeProvisioner(address, security=showing(token)) as giver:
        await until(lambda: giver.responses, "let in")


async def join(address: str, node_id: str, token: str) -> str:
    """An agent's hello: "" when it is let in, else the reason."""

    async def once() -> SpringtideError | None:
        return await _join(address, node_id, token)

    error = await told(once)
    return "" if error is None else error.reason


async def _join(address: str, node_id: str, token: str) -> SpringtideError | None:

    async def hello() -> AsyncIterator[agent_pb2.SessionRequest]:
        yield agent_pb2.SessionRequest(hello=agent_pb2.NodeHello(node_id=node_id, session_id="s", address="127.0.0.1"))
        await asyncio.Event().wait()

    async with channel(address, showing(token)) as ch:
        call = agent_pb2_grpc.AgentServiceStub(ch).Session(hello())
        try:
            with decoded_errors():
                await call.read()
        except SpringtideError as error:
            return error
        finally:
            call.cancel()
    return None


async def test_nodes_come_in_with_the_token_of_their_order(networked: tuple[ControlPlane, str]) -> None:
    """Rule 13, CP9: the order brings a token for its nodes; it opens AgentService to them, to nobody else, nothing
    else; it lives as long as its node does."""
    plane, address = networked
    giver_token = await token_for(address, "p1")
    async with FakeProvisioner(address, security=showing(giver_token)) as giver:
        giver.report()
        async with channel(address, showing("operator")) as ch:
            spec = types_pb2.PoolSpec(name="demo", engine="sim", min_workers=1)
            await operator(ch).ApplyPool(cp.ApplyPoolRequest(spec=spec))
        await until(lambda: giver.last.start, "a start")
        start = giver.last.start[0]
        (node_id,) = start.node_ids
        assert start.join_token.startswith("stj1.")
        assert await join(address, "another", start.join_token) == "JOIN_TOKEN_OF_ANOTHER"
        assert await join(address, node_id, giver_token) == "JOIN_TOKEN_OF_ANOTHER"
        assert await join(address, node_id, "") == "UNAUTHENTICATED"
        assert await refusal(address, "p1", start.join_token)
        tokens = plane._door.tokens
        assert tokens is not None
        assert await join(address, "never-ordered", tokens.for_nodes(["never-ordered"], -1.0)) == "JOIN_TOKEN_EXPIRED"
        assert await join(address, node_id, tokens.for_nodes([node_id], -1.0)) == "", "it is awaited"
        assert await join(address, node_id, start.join_token) == ""


async def test_loopback_stays_open(control: tuple[ControlPlane, str]) -> None:
    """Rule 13: no token is asked for, none is sent, and making one says so."""
    _, address = control
    async with channel(address) as ch:
        with pytest.raises(SpringtideError) as refused, decoded_errors():
            await operator(ch).CreateJoinToken(cp.CreateJoinTokenRequest(provisioner_id="p1"))
    assert refused.value.reason == "NO_TOKENS_NEEDED"
