"""A control plane and a router that answer from memory, on a loop of their own."""

import asyncio
import threading

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from springtide.errors import Exhausted, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from springtide.rpc.interceptors import ErrorInterceptor
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import controlplane_pb2_grpc, generation_pb2_grpc
from springtide.v1 import generation_pb2 as gen
from springtide.v1 import types_pb2 as t

AT = Timestamp(seconds=1_700_000_000, nanos=500_000_000)


def make_pool(name="demo", **status):
    spec = t.PoolSpec(name=name, engine="sim", tensor_parallel_size=2, min_workers=1, max_workers=3)
    spec.policy.name = "load_ratio"
    spec.policy.settings.update({"scale_up_threshold": 0.8})
    return t.Pool(
        spec=spec, status=t.PoolStatus(**{"desired_workers": 1, "active": 1, "total": 1, **status}), revision=7
    )


def make_worker(worker_id="demo-1", state=t.WORKER_STATE_ACTIVE, phase=0, **fields):
    return t.Worker(
        worker_id=worker_id,
        pool="demo",
        node_id="node-1",
        gpu_ids=["0", "1"],
        state=state,
        phase=phase,
        condition=t.WORKER_CONDITION_HEALTHY,
        admission=t.WORKER_ADMISSION_OPEN,
        reason="READY",
        in_flight=3,
        max_in_flight=8,
        state_since=AT,
        endpoint="127.0.0.1:41000",
        **fields,
    )


class FakeControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Each change is done after two more looks, as a real one takes its time."""

    def __init__(self):
        self.asked = []
        self.pools = {"demo": make_pool()}
        self.workers = {"demo-1": make_worker()}
        self.nodes = {"node-1": t.Node(node_id="node-1", state=t.NODE_STATE_UP, address="127.0.0.1", free_gpus=["2"])}
        self.pending = []  # (looks left, function)
        self.frozen = False
        self.away = False

    def _look(self):
        if not self.frozen:
            self.pending = [(left - 1, done) for left, done in self.pending]
            for left, done in self.pending:
                if left == 0:
                    done()

    def _pool(self, name):
        if name not in self.pools:
            raise NotFound(kind="pool", name=name, known=self.pools)
        return self.pools[name]

    def _worker(self, worker_id):
        if worker_id not in self.workers:
            raise NotFound(kind="worker", name=worker_id, known=self.workers)
        return self.workers[worker_id]

    def _becomes(self, worker, state, phase=0):
        def done():
            worker.state, worker.phase = state, phase

        self.pending.append((2, done))

    async def ListPools(self, request, context):
        return cp.ListPoolsResponse(pools=self.pools.values())

    async def GetPool(self, request, context):
        self._look()
        return cp.GetPoolResponse(pool=self._pool(request.name))

    async def ApplyPool(self, request, context):
        self.asked.append(request)
        if request.spec.max_workers < request.spec.min_workers:
            raise InvalidArgument(
                field="max_workers",
                value=request.spec.max_workers,
                problem=f"is below min_workers {request.spec.min_workers}",
                remedy="Raise max_workers.",
            )
        created = request.spec.name not in self.pools
        pool = t.Pool(spec=request.spec)
        if not request.validate_only:
            self.pools[request.spec.name] = pool
        return cp.ApplyPoolResponse(pool=pool, created=created)

    async def DeletePool(self, request, context):
        self.asked.append(request)
        self._pool(request.name)
        if not request.drain:
            raise FailedPrecondition(
                "Pool demo has 1 worker.", reason="POOL_HAS_WORKERS", remedy="Delete it with --drain."
            )
        self.pending.append((2, lambda: self.pools.pop(request.name)))
        return cp.DeletePoolResponse()

    async def ScalePool(self, request, context):
        self.asked.append(request)
        pool = self._pool(request.pool)
        if request.HasField("workers"):
            pool.status.desired_workers = pool.status.manual_workers = request.workers
            self.pending.append((2, lambda: setattr(pool.status, "active", request.workers)))
        return cp.ScalePoolResponse(pool=pool)

    async def PausePool(self, request, context):
        self.asked.append(request)
        pool = self._pool(request.pool)
        pool.status.hold_reason = request.reason
        return cp.PausePoolResponse(pool=pool)

    async def ResumePool(self, request, context):
        self.asked.append(request)
        return cp.ResumePoolResponse(pool=self._pool(request.pool))

    async def GetWorker(self, request, context):
        self._look()
        return cp.GetWorkerResponse(worker=self._worker(request.worker_id))

    async def ListWorkers(self, request, context):
        self.asked.append(request)
        if self.away:
            raise Unavailable("It is starting again.", retry_after_s=1)
        return cp.ListWorkersResponse(workers=self.workers.values())

    async def DrainWorker(self, request, context):
        self.asked.append(request)
        worker = self._worker(request.worker_id)
        worker.state, worker.phase = t.WORKER_STATE_DRAINING, t.WORKER_PHASE_FINISHING
        self._becomes(worker, t.WORKER_STATE_INACTIVE, t.WORKER_PHASE_STOPPED)
        return cp.DrainWorkerResponse(worker=worker)

    async def SleepWorker(self, request, context):
        self.asked.append(request)
        worker = self._worker(request.worker_id)
        worker.state, worker.phase = t.WORKER_STATE_DRAINING, t.WORKER_PHASE_FINISHING
        self._becomes(worker, t.WORKER_STATE_INACTIVE, t.WORKER_PHASE_SLEEPING)
        return cp.SleepWorkerResponse(worker=worker)

    async def LendWorker(self, request, context):
        self.asked.append(request)
        return cp.LendWorkerResponse(worker=self._worker(request.worker_id))

    async def ReclaimWorker(self, request, context):
        self.asked.append(request)
        return cp.ReclaimWorkerResponse(worker=self._worker(request.worker_id))

    async def WorkerVerb(self, request, context):
        self.asked.append(request)
        self._worker(request.worker_id)
        answer = cp.WorkerVerbResponse()
        answer.result.update({"running": 3})
        return answer

    async def SetWeights(self, request, context):
        self.asked.append(request)
        return cp.SetWeightsResponse(pool=self._pool(request.pool))

    async def NoticeNode(self, request, context):
        self.asked.append(request)
        return cp.NoticeNodeResponse(node=self.nodes[request.node_id])

    async def CreateJoinToken(self, request, context):
        self.asked.append(request)
        return cp.CreateJoinTokenResponse(token="stj1.made", expires_at=AT)

    async def UndrainWorker(self, request, context):
        self._worker(request.worker_id)
        raise FailedPrecondition("Worker demo-1 is RELEASING.", reason="TOO_LATE", remedy="Activate it later.")

    async def ActivateWorker(self, request, context):
        worker = self._worker(request.worker_id)
        worker.state, worker.phase = t.WORKER_STATE_STARTING, t.WORKER_PHASE_REQUESTED
        self._becomes(worker, t.WORKER_STATE_ACTIVE)
        return cp.ActivateWorkerResponse(worker=worker)

    async def CancelWorker(self, request, context):
        return cp.CancelWorkerResponse(worker=self._worker(request.worker_id))

    async def ListNodes(self, request, context):
        return cp.ListNodesResponse(nodes=self.nodes.values())

    async def CordonNode(self, request, context):
        if request.node_id not in self.nodes:
            raise NotFound(kind="node", name=request.node_id, known=self.nodes)
        node = self.nodes[request.node_id]
        node.cordoned, node.cordon_reason = True, request.reason
        return cp.CordonNodeResponse(node=node)

    async def UncordonNode(self, request, context):
        node = self.nodes[request.node_id]
        node.cordoned = False
        return cp.UncordonNodeResponse(node=node)

    async def ListDecisions(self, request, context):
        self.asked.append(request)
        decision = t.Decision(
            decision_id=4, pool="demo", at=AT, policy="load_ratio", result=t.DECISION_RESULT_SCALE_UP, count=1
        )
        decision.from_workers, decision.to_workers, decision.reason = 1, 2, "LOAD_ABOVE_THRESHOLD"
        decision.inputs.update({"load_ratio": 0.9, "waiting": None})
        return cp.ListDecisionsResponse(decisions=[decision])

    async def PreviewScaling(self, request, context):
        self.asked.append(request)
        self._pool(request.pool)
        decision = t.Decision(
            pool=request.pool,
            at=AT,
            result=t.DECISION_RESULT_SCALE_UP,
            from_workers=1,
            to_workers=2,
            reason="PREVIEWED",
        )
        return cp.PreviewScalingResponse(
            decision=decision,
            explanation=cp.Explanation(seen=["ACTIVE workers: 1"], steps=["need: 1 -> 2: 40 requests"]),
            events=[t.Event(at=AT, action="scale_up_start", target="demo-2", reason="PREVIEWED")],
            conditions=["CANNOT_PLACE: n1 is full"],
        )

    async def ExplainDecision(self, request, context):
        self.asked.append(request)
        if request.decision_id > 9:
            raise NotFound(kind="decision", name=str(request.decision_id), known=["9"])
        decision = t.Decision(decision_id=9, pool="demo", at=AT, result=t.DECISION_RESULT_HOLD, reason="AT_MAX")
        hints = ["Raise max_workers to let it grow."]
        return cp.ExplainDecisionResponse(decision=decision, explanation=cp.Explanation(hints=hints))

    def event(self, event_id, action="scale_up_start", status="scaling_up"):
        return t.Event(event_id=event_id, at=AT, action=action, target="demo-2", status=status, pool="demo")

    async def ListEvents(self, request, context):
        self.asked.append(request)
        return cp.ListEventsResponse(events=[self.event(1), self.event(2, "scale_up_complete", "active")])

    async def WatchEvents(self, request, context):
        self.asked.append(request)
        yield cp.WatchEventsResponse(event=self.event(3, "scale_down_start", "draining"))

    async def GetMetrics(self, request, context):
        return cp.GetMetricsResponse(active_workers=1, total_workers=2, active_requests=3, total_capacity=8)

    async def GetSummary(self, request, context):
        return cp.GetSummaryResponse(active_instances=1, active_servers=1, total_servers=1, total_instances=1)

    async def GetStatus(self, request, context):
        return cp.GetStatusResponse(
            store_id="store",
            revision=42,
            pools=self.pools.values(),
            nodes=self.nodes.values(),
            workers=self.workers.values(),
            routers=[cp.RouterStatus(router_id="router-1", acked_revision=42)],
            version="0.1.0",
        )


class FakeRouter(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self):
        self.asked = []
        self.models = [gen.Model(name="demo", pool="demo", engine="sim", active_workers=1)]
        self.fail_every = 0
        self.cut = False

    async def ListModels(self, request, context):
        return gen.ListModelsResponse(models=self.models)

    async def Generate(self, request, context):
        self.asked.append(request)
        if request.pool not in [m.name for m in self.models]:
            raise NotFound(kind="pool", name=request.pool, known=[m.name for m in self.models])
        if self.fail_every and len(self.asked) % self.fail_every == 0:
            raise Exhausted("The queue of pool demo is full.", reason="QUEUE_FULL", retry_after_s=2.0)
        yield gen.GenerateResponse(started=gen.Started(request_id="r-1", worker_id="demo-1", attempts=1))
        yield gen.GenerateResponse(tokens=gen.Tokens(text="Par"))
        yield gen.GenerateResponse(tokens=gen.Tokens(text="is"))
        if not self.cut:
            yield gen.GenerateResponse(finished=gen.Finished(finish_reason="stop", completion_tokens=2))


class FakeStack:
    """Both, served on two ports by one thread."""

    def __init__(self):
        self.controlplane, self.router = FakeControlPlane(), FakeRouter()
        self.health = [health.aio.HealthServicer(), health.aio.HealthServicer()]
        self.addresses = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers = []

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def set_health(self, which, status):
        await self.health[which].set("", status)

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self):
        adders = (
            lambda s: controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server(self.controlplane, s),
            lambda s: generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.router, s),
        )
        for add, servicer in zip(adders, self.health, strict=True):
            server = grpc.aio.server(interceptors=[ErrorInterceptor()])
            add(server)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
            self.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            self._servers.append(server)

    async def _stop(self):
        for server in self._servers:
            await server.stop(None)
