"""The asyncio client: one method per thing that can be asked of a control plane or a router."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from springtide.client.spec import pool_spec
from springtide.rpc.client import ChannelSecurity, channel, controlplane_address, decoded_errors
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import generation_pb2 as gen
from springtide.v1.controlplane_pb2_grpc import ControlPlaneServiceStub
from springtide.v1.generation_pb2_grpc import GenerationServiceStub
from springtide.v1.types_pb2 import Decision, Node, Pool, PoolSpec, Worker
from springtide.v1.types_pb2 import Event as RecordedEvent

DEFAULT_ROUTER = "127.0.0.1:7500"

Event = gen.Started | gen.Tokens | gen.Finished
Chat = str | Sequence[Mapping[str, str]]

# A shim that drains or a model that loads takes its time; everything else answers at once.
CALL_TIMEOUT_S = 15.0
_VERB_SLACK_S = 10.0  # of the control plane, on top of the engine's time


def router_address(environ: Mapping[str, str] | None = None) -> str:
    """Where the router is: SPRINGTIDE_ROUTER, else the default."""
    return (os.environ if environ is None else environ).get("SPRINGTIDE_ROUTER") or DEFAULT_ROUTER


class AsyncSpringtide:
    """A control plane and a router. Channels open at the first call. A context manager; else `close()` it.

    `address`, `router`: host:port; default SPRINGTIDE_ADDRESS and SPRINGTIDE_ROUTER, else 127.0.0.1:7400 and :7500.
    Raises springtide.errors; what cannot be reached is Unavailable with a reason that ends in `_UNREACHABLE`.
    """

    def __init__(
        self,
        address: str | None = None,
        router: str | None = None,
        *,
        security: ChannelSecurity | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.address = address or controlplane_address()
        self.router = router or router_address()
        self._security = security
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for open_channel in channels:
            await open_channel.close()

    # ------------------------------------------------------------ pools

    async def pools(self) -> list[Pool]:
        return list((await self._ask("ListPools", cp.ListPoolsRequest())).pools)

    async def pool(self, name: str) -> Pool:
        found: Pool = (await self._ask("GetPool", cp.GetPoolRequest(name=name))).pool
        return found

    async def apply(self, spec: PoolSpec | Mapping[str, Any], *, validate_only: bool = False) -> tuple[Pool, bool]:
        """Creates the pool or replaces its spec. Returns it and whether it is new."""
        message = spec if isinstance(spec, PoolSpec) else pool_spec(spec)
        answer = await self._ask("ApplyPool", cp.ApplyPoolRequest(spec=message, validate_only=validate_only))
        return answer.pool, answer.created

    async def delete(self, name: str, *, drain: bool = False) -> None:
        await self._ask("DeletePool", cp.DeletePoolRequest(name=name, drain=drain))

    async def scale(self, pool: str, workers: int | None) -> Pool:
        """Pins the desired count; None gives it back to the policy."""
        request = cp.ScalePoolRequest(pool=pool, workers=workers, automatic=workers is None)
        scaled: Pool = (await self._ask("ScalePool", request)).pool
        return scaled

    async def pause(self, pool: str, *, hold_s: float | None = None, reason: str = "") -> Pool:
        """Holds scaling for `hold_s` seconds (default 10 min)."""
        request = cp.PausePoolRequest(pool=pool, hold=_duration(hold_s), reason=reason)
        paused: Pool = (await self._ask("PausePool", request)).pool
        return paused

    async def resume(self, pool: str) -> Pool:
        resumed: Pool = (await self._ask("ResumePool", cp.ResumePoolRequest(pool=pool))).pool
        return resumed

    # ------------------------------------------------------------ workers

    async def workers(self, *, pool: str = "", node: str = "") -> list[Worker]:
        return list((await self._ask("ListWorkers", cp.ListWorkersRequest(pool=pool, node_id=node))).workers)

    async def worker(self, worker_id: str) -> Worker:
        return await self._worker("GetWorker", cp.GetWorkerRequest(worker_id=worker_id))

    async def drain(self, worker_id: str, *, timeout_s: float | None = None, reason: str = "") -> Worker:
        """ACTIVE to DRAINING; running requests have `timeout_s` seconds to finish (default: the pool's)."""
        request = cp.DrainWorkerRequest(worker_id=worker_id, timeout=_duration(timeout_s), reason=reason)
        return await self._worker("DrainWorker", request)

    async def sleep(self, worker_id: str, *, timeout_s: float | None = None, reason: str = "") -> Worker:
        """ACTIVE to INACTIVE/SLEEPING: drained, memory released, process kept. `activate` wakes it."""
        request = cp.SleepWorkerRequest(worker_id=worker_id, timeout=_duration(timeout_s), reason=reason)
        return await self._worker("SleepWorker", request)

    async def lend(self, worker_id: str, to: str) -> Worker:
        """The GPUs of a sleeping worker go to a job outside."""
        return await self._worker("LendWorker", cp.LendWorkerRequest(worker_id=worker_id, to=to))

    async def reclaim(self, worker_id: str) -> Worker:
        """Ends that loan."""
        return await self._worker("ReclaimWorker", cp.ReclaimWorkerRequest(worker_id=worker_id))

    async def verb(
        self, worker_id: str, verb: str, args: Mapping[str, str] | None = None, *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """One verb at a worker's engine; what it answers. Unimplemented names the flag that the engine lacks."""
        request = cp.WorkerVerbRequest(
            worker_id=worker_id, verb=verb, args=dict(args or {}), timeout=_duration(timeout_s)
        )
        with decoded_errors("control plane", self.address):
            answer = await self._controlplane.WorkerVerb(request, timeout=2 * timeout_s + _VERB_SLACK_S)
        found: dict[str, Any] = MessageToDict(answer.result)
        return found

    async def set_weights(self, pool: str, version: str, source: str, *, barrier: bool = False) -> Pool:
        """The weights that the pool's workers shall serve; they change one after the other."""
        request = cp.SetWeightsRequest(pool=pool, version=version, source=source, barrier=barrier)
        changed: Pool = (await self._ask("SetWeights", request)).pool
        return changed

    async def undrain(self, worker_id: str) -> Worker:
        return await self._worker("UndrainWorker", cp.UndrainWorkerRequest(worker_id=worker_id))

    async def activate(self, worker_id: str) -> Worker:
        return await self._worker("ActivateWorker", cp.ActivateWorkerRequest(worker_id=worker_id))

    async def cancel(self, worker_id: str) -> Worker:
        """STARTING to INACTIVE."""
        return await self._worker("CancelWorker", cp.CancelWorkerRequest(worker_id=worker_id))

    # ------------------------------------------------------------ nodes

    async def nodes(self) -> list[Node]:
        return list((await self._ask("ListNodes", cp.ListNodesRequest())).nodes)

    async def cordon(self, node_id: str, *, reason: str = "") -> Node:
        """No new worker is placed there."""
        cordoned: Node = (await self._ask("CordonNode", cp.CordonNodeRequest(node_id=node_id, reason=reason))).node
        return cordoned

    async def uncordon(self, node_id: str) -> Node:
        uncordoned: Node = (await self._ask("UncordonNode", cp.UncordonNodeRequest(node_id=node_id))).node
        return uncordoned

    async def notice(self, node_id: str, *, in_s: float = 0.0, withdraw: bool = False) -> Node:
        """The node is taken away in `in_s` seconds: its workers are replaced elsewhere and drained before."""
        request = cp.NoticeNodeRequest(node_id=node_id, until_gone=_duration(in_s), withdraw=withdraw)
        noticed: Node = (await self._ask("NoticeNode", request)).node
        return noticed

    # ------------------------------------------------------------ what happened, and where things stand

    async def decisions(self, *, pool: str = "", limit: int = 0, skip_holds: bool = False) -> list[Decision]:
        """Newest first."""
        request = cp.ListDecisionsRequest(pool=pool, limit=limit, skip_holds=skip_holds)
        return list((await self._ask("ListDecisions", request)).decisions)

    async def preview(
        self,
        pool: str,
        *,
        policy: str = "",
        settings: Mapping[str, Any] | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        waiting: int | None = None,
    ) -> cp.PreviewScalingResponse:
        """What the pool's policy would decide now, or another policy, settings, bounds or load. Changes nothing."""
        request = cp.PreviewScalingRequest(pool=pool, min_workers=min_workers, max_workers=max_workers, waiting=waiting)
        if policy or settings:
            request.policy.name = policy
            request.policy.settings.update(dict(settings or {}))
        response: cp.PreviewScalingResponse = await self._ask("PreviewScaling", request)
        return response

    async def explain(self, decision_id: int = 0, *, pool: str = "") -> cp.ExplainDecisionResponse:
        """A recorded decision in words; with id 0 the newest, of the pool where one is named."""
        request = cp.ExplainDecisionRequest(decision_id=decision_id, pool=pool)
        response: cp.ExplainDecisionResponse = await self._ask("ExplainDecision", request)
        return response

    async def events(self, *, pool: str = "", limit: int = 0, after_event_id: int = 0) -> list[RecordedEvent]:
        """The newest `limit`, oldest first."""
        request = cp.ListEventsRequest(pool=pool, limit=limit, after_event_id=after_event_id)
        return list((await self._ask("ListEvents", request)).events)

    async def watch_events(self, *, pool: str = "", after_event_id: int | None = None) -> AsyncIterator[RecordedEvent]:
        """Events from now on, or after an id, for ever."""
        call = self._controlplane.WatchEvents(cp.WatchEventsRequest(pool=pool, after_event_id=after_event_id))
        with decoded_errors("control plane", self.address):
            async for answer in call:
                yield answer.event

    async def metrics(self, *, pool: str = "") -> cp.GetMetricsResponse:
        found: cp.GetMetricsResponse = await self._ask("GetMetrics", cp.GetMetricsRequest(pool=pool))
        return found

    async def summary(self) -> cp.GetSummaryResponse:
        found: cp.GetSummaryResponse = await self._ask("GetSummary", cp.GetSummaryRequest())
        return found

    async def status(self) -> cp.GetStatusResponse:
        """Everything at one revision."""
        found: cp.GetStatusResponse = await self._ask("GetStatus", cp.GetStatusRequest())
        return found

    async def provisioners(self) -> list[cp.ProvisionerStatus]:
        """Who gives nodes, and how many."""
        return list((await self.status()).provisioners)

    async def create_token(
        self, provisioner_id: str, *, valid_for_s: float | None = None
    ) -> cp.CreateJoinTokenResponse:
        """A secret that lets the provisioner in over a network, for `valid_for_s` seconds (default a day)."""
        request = cp.CreateJoinTokenRequest(provisioner_id=provisioner_id, valid_for=_duration(valid_for_s))
        made: cp.CreateJoinTokenResponse = await self._ask("CreateJoinToken", request)
        return made

    async def health(self, *, router: bool = False, service: str = "") -> str:
        """SERVING, NOT_SERVING or UNKNOWN, by the standard health service of the control plane or of the router."""
        address, what = (self.router, "router") if router else (self.address, "control plane")
        stub = health_pb2_grpc.HealthStub(self._channel(address))
        with decoded_errors(what, address):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=self._timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    # ------------------------------------------------------------ tokens

    async def models(self) -> list[gen.Model]:
        with decoded_errors("router", self.router):
            answer = await self._generation.ListModels(gen.ListModelsRequest(), timeout=self._timeout_s)
        return list(answer.models)

    async def generate(
        self,
        pool: str,
        prompt: str | None = None,
        *,
        chat: Chat | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool | None = None,
        extra: Mapping[str, Any] | None = None,
        request_id: str = "",
        session_id: str = "",
        return_token_ids: bool = False,
        logprobs: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """One generation: Started, Tokens ..., Finished. Give one of `prompt`, `chat` (text, or role/content messages)
        and `token_ids`. `logprobs`: of each token, and of so many likeliest ones in its place. Leaving the iteration
        aborts the generation at the engine."""
        request = gen.GenerateRequest(
            pool=pool,
            request_id=request_id,
            session_id=session_id,
            return_token_ids=return_token_ids,
            logprobs=logprobs,
            sampling=gen.Sampling(
                max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop, ignore_eos=ignore_eos
            ),
        )
        if extra:
            request.sampling.extra.update(extra)
        if chat is not None:
            messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
            request.chat.messages.extend(gen.ChatMessage(role=m["role"], content=m["content"]) for m in messages)
        elif token_ids is not None:
            request.token_ids.ids.extend(token_ids)
        else:
            request.prompt = prompt or ""
        call = self._generation.Generate(request, timeout=timeout_s)
        try:
            with decoded_errors("router", self.router):
                async for answer in call:
                    kind = answer.WhichOneof("event")
                    if kind is not None:  # an event of a newer router is passed over
                        yield getattr(answer, kind)
        finally:
            call.cancel()

    async def text(self, pool: str, prompt: str | None = None, **options: Any) -> str:
        """The whole answer of `generate`."""
        return "".join([e.text async for e in self.generate(pool, prompt, **options) if isinstance(e, gen.Tokens)])

    # ------------------------------------------------------------ inside

    async def _ask(self, method: str, request: Any) -> Any:
        with decoded_errors("control plane", self.address):
            return await getattr(self._controlplane, method)(request, timeout=self._timeout_s)

    async def _worker(self, method: str, request: Any) -> Worker:
        found: Worker = (await self._ask(method, request)).worker
        return found

    @property
    def _controlplane(self) -> ControlPlaneServiceStub:
        return ControlPlaneServiceStub(self._channel(self.address))

    @property
    def _generation(self) -> GenerationServiceStub:
        return GenerationServiceStub(self._channel(self.router))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channel(address, self._security)
        return self._channels[address]


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
