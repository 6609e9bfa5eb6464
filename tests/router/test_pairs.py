"""Prefill and decode pairs by both fronts: real simulated engines, a router in this process (F40)."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from nodeagent.engines.http import EngineHttp
from nodeagent.engines.sim.tokens import answer_text
from router.config import Timeouts
from springtide.model.enums import Role
from springtide.model.routing import RoutedPool, RoutedWorker, RoutingTable
from springtide.v1 import generation_pb2 as pb
from tests.dataplane.fakes import Client, Peer, Script, client, post, says, until, upstream
from tests.router.fakes import Router, generation_stub, router, sim_engine

CONNECTOR = ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}', "--timing-scale", "0.1")
PROMPT = "the tide follows the load " * 20
FRONTS = ("http", "whole", "h2", "grpcio")
LONG = Timeouts(total_timeout_s=3000.0, idle_timeout_s=3000.0)
"""No time-out ends a test."""
Engine = tuple[int, asyncio.subprocess.Process]


@dataclass
class Fleet:
    """Prefill workers p0, p1, … and decode workers d0, d1, … of the model m; tables of those that are left."""

    prefill: list[Engine]
    decode: list[Engine]
    gone: set[str] = field(default_factory=set)
    revision: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)

    def table(self, role: Role = Role.PREFILL) -> RoutingTable:
        self.revision += 1
        pools = {
            "pre": RoutedPool("pre", "m", engine="sim", max_workers=4, role=role, max_waiting=8),
            "dec": RoutedPool("dec", "m", engine="sim", max_workers=4, role=Role.DECODE, max_waiting=8),
        }
        workers = {}
        for pool, engines in (("pre", self.prefill), ("dec", self.decode)):
            for number, (port, _) in enumerate(engines):
                name = f"{pool[0]}{number}"
                if name not in self.gone:
                    found = RoutedWorker(name, pool, self.incarnations.get(name, 1), f"127.0.0.1:{port}")
                    workers[name] = replace(found, weight_version=self.versions.get(name, ""))
        return RoutingTable("s", self.revision, pools, workers)


@contextlib.asynccontextmanager
async def fleet(folder: Path, prefill: int = 1, decode: int = 1, *flags: str) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(sim_engine(folder, *CONNECTOR, *flags)) for _ in range(prefill + decode)
        ]
        yield Fleet(engines[:prefill], engines[prefill:])


async def counts(engine: Engine) -> dict[str, float]:
    text = (await EngineHttp(f"127.0.0.1:{engine[0]}").get("/metrics")).text()
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0].removeprefix("sim_kv_"): float(value) for name, value in lines}


async def inject(engine: Engine, **fault: Any) -> None:
    assert (await EngineHttp(f"127.0.0.1:{engine[0]}").post("/fault", fault)).status == 200


def paired(r: Router, outcome: str) -> float:
    value = r.dispatcher.metrics.registry.get_sample_value(
        "springtide_router_pairs_total", {"pool": "dec", "outcome": outcome}
    )
    return value or 0.0


async def ask(r: Router, front: str, prompt: str = PROMPT, n: int = 20) -> str:
    """The answer's text; an assertion where there is none."""
    if front in ("http", "whole"):
        body = {"model": "m", "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": front == "http"}
        async with client(r.http_port) as c:
            c.send(post("/v1/completions", json.dumps(body).encode()))
            return await (_events if front == "http" else _whole)(c)
    text = ""
    async with generation_stub(r.grpc_address) as stub:
        request = pb.GenerateRequest(pool="m", prompt=prompt, sampling=pb.Sampling(max_tokens=n, temperature=0))
        async for response in stub.Generate(request, timeout=60):
            text += response.tokens.text
    return text


async def _events(c: Client) -> str:
    head = await c.head()
    assert head.startswith(b"HTTP/1.1 200"), head
    raw = await c.chunks()
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def _whole(c: Client) -> str:
    head = await c.head()
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
    body = await c.exactly(length)
    assert head.startswith(b"HTTP/1.1 200"), body
    text: str = json.loads(body)["choices"][0]["text"]
    return text


@contextlib.asynccontextmanager
async def routed(front: str, table: RoutingTable, **options: Any) -> AsyncIterator[Router]:
    kind = front if front == "grpcio" else "h2"
    async with router(table, generate_front=kind, timeouts=options.pop("timeouts", LONG), **options) as r:
        yield r
        await until(lambda: not r.in_flight, 20)
        assert not r.dispatcher.watching
        assert not r.dispatcher.admission.waiting_pools()


def breakers(r: Router) -> dict[str, int]:
    return {seat.worker.worker_id: seat.failures_total for seat in r.dispatcher.admission.fleet.all()}


@pytest.mark.parametrize("front", FRONTS)
async def test_one_computes_the_prompt_and_another_the_answer(tmp_path: Path, front: str) -> None:
    """F40: the answer is the oracle's, and its KV went from one process to the other."""
    async with fleet(tmp_path, 1, 2) as f, routed(front, f.table()) as r:
        for number in range(4):
            assert await ask(r, front, f"{PROMPT}{number}") == answer_text(f"{PROMPT}{number}", 20)
        assert paired(r, "paired") == 4
        assert (await counts(f.prefill[0]))["sent_total"] == 4
        assert sum([(await counts(engine))["received_total"] for engine in f.decode]) == 4
        assert r.dispatcher.admission.demand("pre").requests_total == 4


@pytest.mark.parametrize("front", FRONTS)
async def test_a_prefill_worker_that_fails_is_blamed_alone(tmp_path: Path, front: str) -> None:
    """F40: another one is tried; without one the decode worker computes the whole request."""
    async with fleet(tmp_path, 2) as f, routed(front, f.table()) as r:
        f.prefill[0][1].kill()
        await f.prefill[0][1].wait()
        for _ in range(4):
            assert await ask(r, front) == answer_text(PROMPT, 20)
        assert paired(r, "prefill_retried") >= 1
        assert paired(r, "paired") == 4
        f.prefill[1][1].kill()
        await f.prefill[1][1].wait()
        for _ in range(3):
            assert await ask(r, front) == answer_text(PROMPT, 20)
        assert paired(r, "decode_alone") == 3
        assert breakers(r)["d0"] == 0
        assert breakers(r)["p0"] > 0


@pytest.mark.parametrize("front", FRONTS)
async def test_no_prefill_worker_is_demand(tmp_path: Path, front: str) -> None:
    async with fleet(tmp_path, 0) as f, routed(front, f.table()) as r:
        assert await ask(r, front) == answer_text(PROMPT, 20)
        assert paired(r, "decode_alone") == 1
        (report,) = [pool for pool in r.dispatcher.report().pools if pool.pool == "pre"]
        assert report.rejected == 1


@pytest.mark.parametrize("front", FRONTS)
async def test_a_partner_that_leaves_ends_the_wait_for_its_kv(tmp_path: Path, front: str) -> None:
    """F40: the decode worker waits for KV that nobody sends; its partner's end is the end of that. No time-out is near,
    and the decode worker is asked again."""
    async with fleet(tmp_path, 2) as f, routed(front, f.table()) as r:
        await inject(f.decode[0], kind="pull_hangs", count=1)
        asking = asyncio.create_task(ask(r, front))
        seats = {seat.worker.worker_id: seat for seat in r.dispatcher.admission.fleet.all()}
        await until(lambda: r.dispatcher.watching and seats["d0"].own == 1, 20)

        async def pulls() -> bool:
            return (await counts(f.decode[0]))["pulling"] == 1

        await eventually(pulls)
        asked = next(name for name in ("p0", "p1") if seats[name].requests_total)
        f.gone.add(asked)
        r.dispatcher.snapshot(f.table())
        assert await asyncio.wait_for(asking, 30) == answer_text(PROMPT, 20)
        assert (paired(r, "partner_lost"), paired(r, "paired")) == (1, 1)
        assert seats["d0"].failures_total == 0
        assert breakers(r)["d0"] == 0


async def eventually(probe: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await probe():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("front", FRONTS)
async def test_kv_that_cannot_be_loaded_is_not_the_decode_workers_fault(tmp_path: Path, front: str) -> None:
    """F40: the partner is dead, or well but without the KV: blamed is the one that is dead, and nobody else."""
    async with fleet(tmp_path, 2) as f, routed(front, f.table()) as r:
        for engine in f.prefill:
            await inject(engine, kind="kv_dropped", count=1)
        assert await ask(r, front) == answer_text(PROMPT, 20)
        assert (paired(r, "partner_lost"), paired(r, "decode_alone")) == (1, 1)
        assert breakers(r) == {"p0": 0, "p1": 0, "d0": 0}


@pytest.mark.parametrize("front", FRONTS)
async def test_a_partner_that_dies_behind_its_answer_is_blamed(tmp_path: Path, front: str) -> None:
    """F40: it has answered, and its KV is gone with it; the decode worker says so by an error of its own."""

    async def dies(peer: Peer) -> None:
        kv = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}
        body = json.dumps({"kv_transfer_params": kv}).encode()
        await peer.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        peer.writer.close()

    async with upstream(dies, says(b"", close=True)) as dying, fleet(tmp_path, 0) as f:
        f.prefill.append((dying.port, f.decode[0][1]))
        async with routed(front, f.table()) as r:
            assert await ask(r, front) == answer_text(PROMPT, 20)
            assert (paired(r, "partner_lost"), paired(r, "decode_alone")) == (1, 1)
            assert breakers(r) == {"p0": 1, "d0": 0}


@pytest.mark.parametrize("front", FRONTS)
async def test_a_dead_decode_worker_is_its_own_fault(tmp_path: Path, front: str) -> None:
    """F40: a new pair without it."""
    async with fleet(tmp_path, 1, 2) as f, routed(front, f.table()) as r:
        f.decode[0][1].kill()
        await f.decode[0][1].wait()
        for number in range(3):
            assert await ask(r, front, f"{PROMPT}{number}") == answer_text(f"{PROMPT}{number}", 20)
        assert breakers(r)["d0"] >= 1
        assert breakers(r)["p0"] == 0
        assert paired(r, "paired") == 3


@pytest.mark.parametrize("front", ["http", "whole", "h2", "grpcio"])
async def test_a_client_that_leaves_during_the_prefill(tmp_path: Path, front: str) -> None:
    """F40: both seats are free, and the prefill engine has nothing to do any more."""
    async with fleet(tmp_path, 1, 1, "--prefill-tokens-per-s", "1") as f, routed(front, f.table()) as r:
        asking = asyncio.create_task(ask(r, front))

        async def prefills() -> bool:
            return (await counts(f.prefill[0]))["vllm:num_requests_running"] == 1

        async def idle() -> bool:
            return (await counts(f.prefill[0]))["vllm:num_requests_running"] == 0

        await eventually(prefills)
        assert r.in_flight == 2
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(idle)
        await until(lambda: r.in_flight == 0, 20)
        assert (await counts(f.decode[0]))["vllm:num_requests_running"] == 0


@pytest.mark.parametrize("front", FRONTS)
async def test_a_prefill_worker_that_leaves_while_it_computes(tmp_path: Path, front: str) -> None:
    """F40: its answer is not waited for, whether its node is gone or only the worker drains."""
    async with fleet(tmp_path, 1, 1) as f, routed(front, f.table()) as r:
        seats = {seat.worker.worker_id: seat for seat in r.dispatcher.admission.fleet.all()}
        f.prefill[0][1].send_signal(signal.SIGSTOP)
        asking = asyncio.create_task(ask(r, front))
        await until(lambda: seats["p0"].own == 1, 20)
        f.gone.add("p0")
        r.dispatcher.snapshot(f.table())
        assert await asyncio.wait_for(asking, 30) == answer_text(PROMPT, 20)
        assert paired(r, "decode_alone") == 1
        assert seats["p0"].failures_total == 0


@pytest.mark.parametrize("front", FRONTS)
async def test_a_silent_prefill_worker_costs_half_of_the_time(tmp_path: Path, front: str) -> None:
    """F40: the first-byte time-out covers both legs."""
    timeouts = Timeouts(total_timeout_s=3000.0, first_byte_timeout_s=4.0)
    async with fleet(tmp_path, 1, 1) as f, routed(front, f.table(), timeouts=timeouts) as r:
        f.prefill[0][1].send_signal(signal.SIGSTOP)
        assert await ask(r, front) == answer_text(PROMPT, 20)
        assert paired(r, "decode_alone") == 1
        assert breakers(r) == {"p0": 1, "d0": 0}


async def test_weights_of_both_are_the_same(tmp_path: Path) -> None:
    """KV of other weights would give other tokens."""
    async with fleet(tmp_path, 2, 1) as f:
        f.versions = {"p0": "1", "p1": "2", "d0": "2"}
        async with routed("http", f.table()) as r:
            for number in range(3):
                assert await ask(r, "http", f"{PROMPT}{number}") == answer_text(f"{PROMPT}{number}", 20)
            assert (await counts(f.prefill[1]))["sent_total"] == 3
            f.versions["d0"] = "3"
            f.incarnations["d0"] = 2
            r.dispatcher.snapshot(f.table())
            assert await ask(r, "http") == answer_text(PROMPT, 20)
            assert paired(r, "decode_alone") == 1


async def test_a_decode_worker_that_is_full_costs_no_second_prefill(tmp_path: Path) -> None:
    """KV that was not asked for serves the next attempt."""
    refusal = b"HTTP/1.1 503 X\r\nx-springtide-refusal: full\r\ncontent-length: 2\r\n\r\n{}"
    async with upstream(says(refusal)) as full, fleet(tmp_path, 1, 1) as f:
        f.decode.insert(0, (full.port, f.decode[0][1]))
        async with routed("http", f.table()) as r:
            for number in range(4):
                assert await ask(r, "http", f"{PROMPT}{number}") == answer_text(f"{PROMPT}{number}", 20)
            assert full.requests
            assert (await counts(f.prefill[0]))["sent_total"] == 4
            assert r.dispatcher.admission.demand("pre").requests_total == 4


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({}, b"x-role: decode\r\n"),
        ({}, b"x-role: prefill\r\n"),
        ({"echo": True}, b""),
        ({"prompt_logprobs": 1}, b""),
        ({"kv_transfer_params": {"mine": 1}}, b""),
    ],
)
async def test_what_one_worker_serves(tmp_path: Path, fields: dict[str, Any], extra: bytes) -> None:
    async with fleet(tmp_path, 1, 1) as f, routed("http", f.table()) as r, client(r.http_port) as c:
        body = {"model": "m", "prompt": "x", "max_tokens": 3, **fields}
        c.send(post("/v1/completions", json.dumps(body).encode(), extra))
        assert (await _whole(c)) == answer_text("x", 3)
        assert [paired(r, outcome) for outcome in ("paired", "decode_alone")] == [0, 0]


async def test_engines_without_a_connector_are_asked_in_vain(tmp_path: Path) -> None:
    async with (
        sim_engine(tmp_path) as one,
        sim_engine(tmp_path) as other,
        routed("http", Fleet([one], [other]).table()) as r,
    ):
        assert await ask(r, "http") == answer_text(PROMPT, 20)
        assert paired(r, "decode_alone") == 1


async def test_the_decode_worker_is_asked_with_the_clients_own_words() -> None:
    """Its body is the client's, with what the prefill worker said behind it; that one is asked for one token."""
    told = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "unknown": {"a": 1}}
    answer = json.dumps({"kv_transfer_params": told}).encode()
    prefill: Script = says(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
    decode: Script = says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    async with upstream(prefill) as p, upstream(decode) as d:
        process: Any = None
        table = Fleet([(p.port, process)], [(d.port, process)]).table()
        async with routed("http", table) as r, client(r.http_port) as c:
            sent = b'{"model":"m", "messages":[ ], "max_completion_tokens": 9,"min_tokens":4 ,"odd":1}\n'
            c.send(post("/v1/chat/completions", sent, b"x-request-id: id-1\r\ntraceparent: 00-" + b"a" * 32 + b"\r\n"))
            assert b"200 OK" in await c.head()
            assert await c.exactly(2) == b"{}"
        assert (
            d.requests[0].body
            == sent.rstrip()[:-1] + b',"kv_transfer_params":' + json.dumps(told).replace(" ", "").encode() + b"}"
        )
        asked = json.loads(p.requests[0].body)
        assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"], asked["odd"]) == (1, 1, False, 1)
        assert "min_tokens" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert b"x-request-id: id-1-prefill1" in p.requests[0].head
        assert b"x-request-id: id-1\r\n" in d.requests[0].head
        assert b"traceparent: 00-a" in p.requests[0].head


async def test_a_grpc_deadline_covers_the_prefill(tmp_path: Path) -> None:
    """F40: the call ends at its deadline, and both engines are idle."""
    async with fleet(tmp_path, 1, 1, "--prefill-tokens-per-s", "1") as f:
        for front in ("h2", "grpcio"):
            async with routed(front, f.table()) as r, generation_stub(r.grpc_address) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Generate(pb.GenerateRequest(pool="m", prompt=PROMPT), timeout=0.5):
                        pass
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await until(lambda: r.in_flight == 0, 20)
