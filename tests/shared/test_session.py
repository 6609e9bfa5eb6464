"""A session over a real socket: what is said and when, and how it is begun again whatever ends it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from springtide import errors, session
from springtide.rpc import Server
from springtide.session import Say, Session
from springtide.v1 import provisioner_pb2 as pb
from springtide.v1 import provisioner_pb2_grpc as pb_grpc
from tests.ports import free_port

NAME = "springtide.v1.ProvisionerService"
BOUND_S = 30.0
Request = pb.ProvisionerServiceSessionRequest
Response = pb.ProvisionerServiceSessionResponse


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.005)


class Fixed:
    """Always the same number."""

    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value


class Talker:
    """A speaker of few words. `number`: what there is to report; None: nothing can be said yet."""

    log = logging.getLogger("tests.talker")

    def __init__(self, number: int | None = 0) -> None:
        registry = CollectorRegistry()
        self.sessions = Counter("sessions", "Of the test.", registry=registry)
        self.connected = Gauge("connected", "Of the test.", registry=registry)
        self.number = number
        self.changed: Callable[[], None] = lambda: None
        self.refreshed = 0
        self.answers: list[Response] = []
        self.trouble: Exception | None = None
        self.say: Say[Request] | None = None

    @property
    def metrics(self) -> "Talker":
        return self

    def open(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[Request]
    ) -> "grpc.aio.StreamStreamCall[Request, Response]":
        return pb_grpc.ProvisionerServiceStub(channel).Session(requests)

    def hello(self) -> Request:
        return Request(hello=pb.ProvisionerHello(provisioner_id="p"))

    async def refresh(self) -> None:
        self.refreshed += 1

    def report(self) -> Request | None:
        return None if self.number is None else reported(self.number)

    def take(self, response: Response, say: Say[Request]) -> None:
        self.answers.append(response)
        self.say = say
        if self.trouble is not None:
            raise self.trouble

    def goodbye(self, reason: str) -> Sequence[Request]:
        return [reported(99), Request(goodbye=pb.ProvisionerGoodbye(reason=reason))]

    def on_change(self, call: Callable[[], None]) -> None:
        self.changed = call


def reported(number: int) -> Request:
    return Request(report=pb.ProvisionerReport(sequence=number))


class ControlPlane(pb_grpc.ProvisionerServiceServicer):
    """Writes down what it hears. `answers` go out at once, in each session; `error` ends each with it, one that
    is up when `end` is set."""

    def __init__(self) -> None:
        self.answers: list[Response] = [Response(store_id="s")]
        self.error: errors.SpringtideError | None = None
        self.heard: list[str] = []
        self.open = 0
        self.opened = 0
        self.end = asyncio.Event()
        self.address = ""
        self._server: Server | None = None

    async def start(self, port: int = 0) -> "ControlPlane":
        self._server = Server(None)
        self._server.add(pb_grpc.add_ProvisionerServiceServicer_to_server, self, NAME)
        self.address = self._server.listen(f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Session(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        self.open += 1
        self.opened += 1
        try:
            if self.error is not None:
                await anext(aiter(requests))  # an end while the other side still sends may reach it without its reason
                raise self.error
            listening = asyncio.create_task(self._listen(requests))
            for answer in self.answers:
                yield answer
            ended = asyncio.create_task(self.end.wait())
            await asyncio.wait([ended, listening], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            listening.cancel()
            if self.error is not None:
                raise self.error
        finally:
            self.open -= 1

    async def _listen(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            kind = str(request.WhichOneof("message"))
            self.heard.append(f"{kind} {request.report.sequence}" if kind == "report" else kind)


class Running:
    """A session and its task. `pauses`: the seconds before each reconnection; none is waited for."""

    def __init__(self, talker: Talker, addresses: Sequence[str], *, interval_s: float = 600.0, rng: float = 1.0):
        self.pauses: list[float] = []
        self.session = Session(
            talker, addresses, interval_s=interval_s, reconnect_max_s=1.5, rng=Fixed(rng), sleep=self._sleep
        )
        self.task = asyncio.create_task(self.session.run())

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    made = await ControlPlane().start()
    yield made
    await made.stop()


@pytest.fixture
async def begin() -> AsyncIterator[Callable[..., Running]]:
    """Makes a running session that ends with the test."""
    all_of_them: list[Running] = []

    def make(*args: Any, **more: Any) -> Running:
        all_of_them.append(Running(*args, **more))
        return all_of_them[-1]

    yield make
    for running in all_of_them:
        await running.close()


async def test_a_hello_then_what_is_new(plane: ControlPlane, begin: Callable[..., Running]) -> None:
    """CP10: the hello comes first, nothing is reported before something can be said, a change is told at once."""
    talker = Talker(None)
    running = begin(talker, [plane.address])
    await until(lambda: running.session.connected and plane.heard == ["hello"])
    assert (running.session.store_id, talker.connected._value.get()) == ("s", 1.0)
    for number in (5, 6):
        talker.number = number
        talker.changed()
        await until(lambda: plane.heard[-1] == f"report {talker.number}")
    assert plane.heard == ["hello", "report 5", "report 6"]
    assert talker.refreshed == 0
    assert [answer.store_id for answer in talker.answers] == ["s"]
    assert talker.say is not None
    talker.say(reported(42))
    await until(lambda: plane.heard[-1] == "report 42")


async def test_without_news_a_report_is_due_as_often_as_the_control_plane_says(
    plane: ControlPlane, begin: Callable[..., Running]
) -> None:
    """NA6: what changes without telling is looked at first. The interval of the configuration is ten minutes."""
    plane.answers = [Response(store_id="s", heartbeat_interval_s=0.03)]
    talker = Talker()
    begin(talker, [plane.address])
    await until(lambda: bool(talker.answers))
    talker.changed()  # ends the wait that began before the answer
    await until(lambda: talker.refreshed >= 2)
    await until(lambda: plane.heard.count("report 0") >= talker.refreshed)


async def test_a_new_hello_when_asked_for(plane: ControlPlane, begin: Callable[..., Running]) -> None:
    """CP10: nothing else of such an answer counts, and a report follows."""
    plane.answers = [Response(store_id="s"), Response(register_again=True, store_id="other")]
    talker = Talker()
    running = begin(talker, [plane.address])
    await until(lambda: plane.heard.count("hello") == 2 and plane.heard[-1] == "report 0")
    assert running.session.store_id == "s"
    assert len(talker.answers) == 1


@pytest.mark.parametrize(("rng", "share"), [(1.0, 1.0), (0.0, 0.5), (0.5, 0.75)])
async def test_backoff_grows_and_begins_anew_after_a_session(
    begin: Callable[..., Running], rng: float, share: float
) -> None:
    """NA13: doubled with each failure up to the cap, jitter by the given rng; for ever."""
    port = free_port()
    talker = Talker()
    running = begin(talker, [f"127.0.0.1:{port}"], rng=rng)
    await until(lambda: len(running.pauses) >= 6)
    assert running.pauses[:6] == pytest.approx([share * full for full in (0.2, 0.4, 0.8, 1.5, 1.5, 1.5)])
    plane = await ControlPlane().start(port)
    try:
        await until(lambda: running.session.connected)
        before = len(running.pauses)
    finally:
        await plane.stop()
    await until(lambda: len(running.pauses) >= before + 2)
    assert running.pauses[before : before + 2] == pytest.approx([share * 0.2, share * 0.4])
    assert not running.session.connected
    assert (talker.sessions._value.get(), talker.connected._value.get()) == (1.0, 0.0)


async def test_addresses_take_turns(plane: ControlPlane, begin: Callable[..., Running], caplog) -> None:
    """NA13: one that is dead is left for the next; it is told once, under the speaker's name."""
    dead = f"127.0.0.1:{free_port()}"
    caplog.set_level(logging.INFO)
    running = begin(Talker(), [dead, plane.address])
    await until(lambda: running.session.connected)
    assert running.pauses == pytest.approx([0.2])
    told = [record for record in caplog.records if record.name == "tests.talker"]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]
    assert dead in told[0].getMessage()
    assert plane.address in told[1].getMessage()


async def test_the_same_trouble_is_told_once(begin: Callable[..., Running], caplog) -> None:
    """NA14: for ever is no reason to fill a log."""
    caplog.set_level(logging.WARNING)
    running = begin(Talker(), [f"127.0.0.1:{free_port()}"])
    await until(lambda: len(running.pauses) >= 5)
    assert len([record for record in caplog.records if record.name == "tests.talker"]) == 1


async def test_a_control_plane_that_is_not_the_leader_names_it(
    plane: ControlPlane, begin: Callable[..., Running], caplog
) -> None:
    """Rule 8: it is gone to at once, without back-off; when the leader changes later, the next one, too."""
    caplog.set_level(logging.INFO)
    second, third = await ControlPlane().start(), await ControlPlane().start()
    try:
        plane.error = errors.Unavailable("not the leader.", metadata={"leader": second.address})
        running = begin(Talker(None), [plane.address])
        await until(lambda: second.open == 1 and running.session.connected)
        second.error = errors.Unavailable("not any more.", metadata={"leader": third.address})
        second.end.set()
        await until(lambda: third.open == 1 and running.session.connected)
        assert running.pauses == [0.1, 0.1]
        for old, new in ((plane, second), (second, third)):
            assert f"{old.address} is not the leader; going to {new.address}" in caplog.text
    finally:
        await second.stop()
        await third.stop()


async def test_one_that_names_itself_is_waited_for(plane: ControlPlane, begin: Callable[..., Running]) -> None:
    """Rule 8: a leader that refuses and points at itself is asked again with back-off, not in a circle."""
    plane.error = errors.Unavailable("not yet.", metadata={"leader": plane.address})
    running = begin(Talker(None), [plane.address])
    await until(lambda: len(running.pauses) >= 3)
    assert running.pauses[:3] == pytest.approx([0.2, 0.4, 0.8])


async def test_a_silent_one_is_left(
    plane: ControlPlane, begin: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Rule 8: a connection that stays and says nothing is no session."""
    monkeypatch.setattr(session, "_SILENCE_S", 0.3)
    plane.answers = []
    running = begin(Talker(), [plane.address], interval_s=0.01)
    await until(lambda: plane.opened >= 2)
    assert not running.session.connected
    assert running.pauses[0] == pytest.approx(0.2)
    assert f"the control plane at {plane.address} is silent" in caplog.text


async def test_an_answer_that_cannot_be_followed_ends_one_session_only(
    plane: ControlPlane, begin: Callable[..., Running], caplog
) -> None:
    """Rule 8: it is logged whole, and the next session begins."""
    talker = Talker()
    talker.trouble = ValueError("no such thing")
    running = begin(talker, [plane.address])
    await until(lambda: plane.opened >= 2)
    talker.trouble = None
    await until(lambda: running.session.connected and plane.open == 1)
    record = next(record for record in caplog.records if record.exc_info)
    assert (record.name, record.levelname) == ("tests.talker", "ERROR")


async def test_one_that_takes_nothing_is_not_waited_for(
    plane: ControlPlane, begin: Callable[..., Running], caplog
) -> None:
    """Bounds: what is said beside the reports is lost there, and without a session; who says it goes on."""
    talker = Talker()
    running = begin(talker, [plane.address])
    await until(lambda: talker.say is not None and plane.heard == ["hello", "report 0"])
    say = talker.say
    assert say is not None
    for _ in range(100):  # in one step of the loop: nothing can be taken meanwhile
        say(reported(1))
    assert "takes nothing" in caplog.text
    await running.close()
    say(reported(2))
    assert "report 2" not in plane.heard


async def test_cancelled_it_leaves_nothing(plane: ControlPlane, begin: Callable[..., Running]) -> None:
    """Its call and its tasks end with it, in the middle of a session and while it waits to begin another."""
    before = asyncio.all_tasks()
    running = begin(Talker(), [plane.address])
    await until(lambda: plane.open == 1 and running.session.connected)
    await running.close()
    await until(lambda: plane.open == 0)
    assert running.task.cancelled()
    assert not running.session.connected
    waiting = begin(Talker(), [f"127.0.0.1:{free_port()}"])
    await until(lambda: len(waiting.pauses) >= 1)
    await waiting.close()
    assert waiting.task.cancelled()
    ours = [task for task in asyncio.all_tasks() - before if "springtide/session.py" in repr(task)]
    assert ours == []


async def test_goodbye_is_heard_to_its_end(plane: ControlPlane, begin: Callable[..., Running]) -> None:
    """NA10: the last state goes before the last word; without a session there is nobody to say it to."""
    talker = Talker()
    running = begin(talker, [plane.address])
    await until(lambda: running.session.connected and "report 0" in plane.heard)
    await running.session.goodbye("done", BOUND_S)
    await running.close()
    first = plane.heard.index("report 99")
    assert plane.heard[first : first + 2] == ["report 99", "goodbye"]
    await running.session.goodbye("again")
    assert plane.heard.count("goodbye") == 1
