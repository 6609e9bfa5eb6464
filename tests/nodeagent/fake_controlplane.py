"""A control plane of a few lines: records what an agent says, answers with what the test wants."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import ReportedPhase, Want
from springtide.model.worker import WorkerReport
from springtide.v1 import agent_pb2, agent_pb2_grpc
from springtide.wire.agent import desired_state, heartbeat_from_proto, hello_from_proto
from springtide.wire.verbs import outcome
from tests.nodeagent.processes import eventually

FAST = ("--startup-s", "0")


def launch(*engine_args: str, gpu_ids: tuple[str, ...] = ("sim0",), **more: Any) -> EngineLaunch:
    """A simulated engine."""
    fields: dict[str, Any] = {"start_timeout_s": 30.0, "stop_grace_s": 5.0, "tensor_parallel_size": len(gpu_ids)}
    fields |= more
    return EngineLaunch(
        engine="sim", model="m", served_model_name="m", gpu_ids=gpu_ids, engine_args=(*FAST, *engine_args), **fields
    )


class FakeControlPlane(agent_pb2_grpc.AgentServiceServicer):
    """`wanted` is sent with each answer. `start` may be called again after `stop`: the port stays the same."""

    def __init__(self, store_id: str = "store-1") -> None:
        self.store_id = store_id
        self.wanted: dict[str, DesiredWorker] = {}
        self.hellos: list[Any] = []
        self.goodbyes: list[str] = []
        self.verbs: dict[str, agent_pb2.VerbOrder] = {}
        self.verb_results: list[agent_pb2.VerbResult] = []
        self.reports: dict[str, WorkerReport] = {}
        self.phases: dict[str, list[ReportedPhase]] = {}
        self.stopping: float | None = None
        self.heartbeats = 0
        self.port = 0
        self.ask_again = False
        self._server: grpc.aio.Server | None = None
        self._push: set[asyncio.Event] = set()

    async def start(self) -> "FakeControlPlane":
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        push = asyncio.Event()
        self._push.add(push)
        reader = asyncio.create_task(self._read(requests, push))
        try:
            while not reader.done():
                waiter = asyncio.create_task(push.wait())
                await asyncio.wait([reader, waiter], return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                push.clear()
                if self.ask_again:
                    self.ask_again = False
                    yield agent_pb2.SessionResponse(register_again=True)
                yield desired_state(self.store_id, 1, 0.2, self.wanted.values(), self.verbs.values())
        finally:
            self._push.discard(push)
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any], push: asyncio.Event) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(hello_from_proto(request.hello))
            elif kind == "goodbye":
                self.goodbyes.append(request.goodbye.reason)
                return
            elif kind == "verb_result":
                self.verb_results.append(request.verb_result)
                self.verbs.pop(request.verb_result.order_id, None)
            else:
                heartbeat = heartbeat_from_proto(request.heartbeat)
                self.heartbeats += 1
                self.stopping = heartbeat.stop_deadline_s if heartbeat.stopping else None
                self.reports = {report.worker_id: report for report in heartbeat.reports}
                for report in heartbeat.reports:
                    seen = self.phases.setdefault(report.worker_id, [])
                    if not seen or seen[-1] is not report.phase:
                        seen.append(report.phase)
                push.set()

    def want(self, worker_id: str, want: Want, generation: int, of: EngineLaunch | None = None, **more: Any) -> None:
        """Changes what is wanted of one worker and tells the agent at once."""
        old = self.wanted.get(worker_id)
        chosen = of or (old.launch if old else launch())
        self.wanted[worker_id] = DesiredWorker(worker_id, "pool-1", generation, want, chosen, **more)
        self.tell()

    async def verb(self, worker_id: str, verb: str, *, incarnation: int = 0, **args: str) -> Any:
        """Orders a verb and waits for its result; raises what the agent raised."""
        order_id = f"o{len(self.verb_results)}-{verb}"
        self.verbs[order_id] = agent_pb2.VerbOrder(
            order_id=order_id, worker_id=worker_id, incarnation=incarnation, verb=verb, args=args, timeout_s=20
        )
        self.tell()
        found = await eventually(lambda: [r for r in self.verb_results if r.order_id == order_id])
        return outcome(found[0])

    def change(self, worker_id: str, **more: Any) -> None:
        """Changes single fields of it."""
        self.wanted[worker_id] = dataclasses.replace(self.wanted[worker_id], **more)
        self.tell()

    def tell(self) -> None:
        for push in self._push:
            push.set()

    async def until(
        self, worker_id: str, phase: ReportedPhase, generation: int = 0, bound_s: float = 40.0
    ) -> WorkerReport:
        """Waits until the worker is reported in a phase, at a generation or a newer one."""

        def check() -> WorkerReport | None:
            report = self.reports.get(worker_id)
            return report if report and report.phase is phase and report.generation >= generation else None

        try:
            found: WorkerReport = await eventually(check, bound_s)
        except AssertionError:
            raise AssertionError(f"{worker_id} is not {phase}: {self.reports.get(worker_id)}") from None
        return found

    async def beats(self, n: int = 3) -> None:
        """Waits for that many further heartbeats."""
        until = self.heartbeats + n
        await eventually(lambda: self.heartbeats >= until)
