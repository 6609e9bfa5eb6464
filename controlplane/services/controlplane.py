"""ControlPlaneService: what operators ask and order. An order is a pure function that the leader commits."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration

from controlplane.core import orders, views
from controlplane.core.snapshot import Plan, Put, Snapshot
from controlplane.loops.hub import Hub
from controlplane.loops.leader import Leader
from controlplane.services.engines import EngineOrders
from controlplane.services.explaining import explain_decision, preview_scaling
from controlplane.services.history import follow_events
from controlplane.services.joining import Door
from controlplane.services.pools import merged
from controlplane.services.present import node_message, pool_message, status_message, worker_message
from controlplane.services.provisioners import create_join_token
from controlplane.store.store import Store
from controlplane.verbs import Verbs
from springtide import __version__
from springtide.clock import Clock
from springtide.model.pool import Pool
from springtide.v1 import controlplane_pb2 as pb
from springtide.v1 import controlplane_pb2_grpc as pb_grpc
from springtide.v1 import types_pb2
from springtide.wire.records import decision_to_proto, event_to_proto
from springtide.wire.values import count

_DECISIONS = (100, 1_000)  # default, most
_EVENTS = (1_000, 10_000)


class ControlPlaneService(pb_grpc.ControlPlaneServiceServicer):
    def __init__(
        self, store: Store, hub: Hub, leader: Leader, clock: Clock, verbs: Verbs, door: Door | None = None
    ) -> None:
        self._door = door or Door()
        self._engines = EngineOrders(leader, verbs)
        self._store = store
        self._hub = hub
        self._leader = leader
        self._clock = clock

    # ------------------------------------------------------------------ pools

    async def ApplyPool(self, request: pb.ApplyPoolRequest, context: Any) -> pb.ApplyPoolResponse:
        mask = request.update_mask if request.HasField("update_mask") else None
        expected = request.expected_revision if request.HasField("expected_revision") else None

        def order(snapshot: Snapshot, now: float) -> Plan:
            spec = merged(snapshot, request.spec, mask)
            return orders.apply_pool(snapshot, spec, now, expected_revision=expected)

        before = await self._leader.snapshot()
        if request.validate_only:
            planned = order(before, self._clock.now())
            put = [w.record for w in planned.writes if isinstance(w, Put) and isinstance(w.record, Pool)]
            pool = put[0] if put else before.pools[request.spec.name]
            created = request.spec.name not in before.pools
            return pb.ApplyPoolResponse(pool=pool_message(before, pool, self._clock.now()), created=created)
        plan, after = await self._leader.execute(order)
        created = any(event.action == "pool_created" for event in plan.events)
        return pb.ApplyPoolResponse(pool=self._pool(after, request.spec.name), created=created)

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        return pb.GetPoolResponse(pool=self._pool(await self._leader.snapshot(), request.name))

    async def ListPools(self, request: pb.ListPoolsRequest, context: Any) -> pb.ListPoolsResponse:
        snapshot = await self._leader.snapshot()
        pools = [self._pool(snapshot, name) for name in sorted(snapshot.pools)]
        return pb.ListPoolsResponse(pools=pools, revision=snapshot.revision)

    async def DeletePool(self, request: pb.DeletePoolRequest, context: Any) -> pb.DeletePoolResponse:
        await self._leader.execute(partial(_delete_pool, name=request.name, drain=request.drain))
        return pb.DeletePoolResponse()

    async def ScalePool(self, request: pb.ScalePoolRequest, context: Any) -> pb.ScalePoolResponse:
        workers = request.workers if request.HasField("workers") else None

        def order(snapshot: Snapshot, now: float) -> Plan:
            return orders.scale_pool(snapshot, request.pool, now, workers=workers, automatic=request.automatic)

        _, after = await self._leader.execute(order)
        return pb.ScalePoolResponse(pool=self._pool(after, request.pool))

    async def PausePool(self, request: pb.PausePoolRequest, context: Any) -> pb.PausePoolResponse:
        hold_s = _seconds(request.hold) if request.HasField("hold") else None

        def order(snapshot: Snapshot, now: float) -> Plan:
            return orders.pause_pool(snapshot, request.pool, now, hold_s=hold_s, reason=request.reason)

        _, after = await self._leader.execute(order)
        return pb.PausePoolResponse(pool=self._pool(after, request.pool))

    async def ResumePool(self, request: pb.ResumePoolRequest, context: Any) -> pb.ResumePoolResponse:
        _, after = await self._leader.execute(lambda snapshot, now: orders.resume_pool(snapshot, request.pool, now))
        return pb.ResumePoolResponse(pool=self._pool(after, request.pool))

    # ------------------------------------------------------------------ workers

    async def GetWorker(self, request: pb.GetWorkerRequest, context: Any) -> pb.GetWorkerResponse:
        return pb.GetWorkerResponse(worker=self._worker(await self._leader.snapshot(), request.worker_id))

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersResponse:
        snapshot = await self._leader.snapshot()
        if request.pool:
            orders.pool_named(snapshot, request.pool)
        if request.node_id:
            orders.node_named(snapshot, request.node_id)
        now = self._clock.now()
        found = views.workers_of(snapshot, request.pool, request.node_id)
        workers = [worker_message(snapshot, worker, now) for worker in found]
        return pb.ListWorkersResponse(workers=workers, revision=snapshot.revision)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        timeout_s = _seconds(request.timeout) if request.HasField("timeout") else None

        def order(snapshot: Snapshot, now: float) -> Plan:
            return orders.drain_worker(snapshot, request.worker_id, now, timeout_s=timeout_s, reason=request.reason)

        _, after = await self._leader.execute(order)
        return pb.DrainWorkerResponse(worker=self._worker(after, request.worker_id))

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Any) -> pb.UndrainWorkerResponse:
        _, after = await self._leader.execute(lambda s, now: orders.undrain_worker(s, request.worker_id, now))
        return pb.UndrainWorkerResponse(worker=self._worker(after, request.worker_id))

    async def ActivateWorker(self, request: pb.ActivateWorkerRequest, context: Any) -> pb.ActivateWorkerResponse:
        _, after = await self._leader.execute(lambda s, now: orders.activate_worker(s, request.worker_id, now))
        return pb.ActivateWorkerResponse(worker=self._worker(after, request.worker_id))

    async def SleepWorker(self, request: pb.SleepWorkerRequest, context: Any) -> pb.SleepWorkerResponse:
        timeout_s = _seconds(request.timeout) if request.HasField("timeout") else None

        def order(snapshot: Snapshot, now: float) -> Plan:
            return orders.sleep_worker(snapshot, request.worker_id, now, timeout_s=timeout_s, reason=request.reason)

        _, after = await self._leader.execute(order)
        return pb.SleepWorkerResponse(worker=self._worker(after, request.worker_id))

    async def LendWorker(self, request: pb.LendWorkerRequest, context: Any) -> pb.LendWorkerResponse:
        _, after = await self._leader.execute(
            lambda s, now: orders.lend_worker(s, request.worker_id, now, to=request.to)
        )
        return pb.LendWorkerResponse(worker=self._worker(after, request.worker_id))

    async def ReclaimWorker(self, request: pb.ReclaimWorkerRequest, context: Any) -> pb.ReclaimWorkerResponse:
        _, after = await self._leader.execute(lambda s, now: orders.reclaim_worker(s, request.worker_id, now))
        return pb.ReclaimWorkerResponse(worker=self._worker(after, request.worker_id))

    async def WorkerVerb(self, request: pb.WorkerVerbRequest, context: Any) -> pb.WorkerVerbResponse:
        timeout_s = _seconds(request.timeout) if request.HasField("timeout") else None
        answer = await self._engines.perform(request.worker_id, request.verb, dict(request.args), timeout_s)
        response = pb.WorkerVerbResponse()
        response.result.update(answer)
        return response

    async def SetWeights(self, request: pb.SetWeightsRequest, context: Any) -> pb.SetWeightsResponse:
        def order(snapshot: Snapshot, now: float) -> Plan:
            version, source, barrier = request.version, request.source, request.barrier
            return orders.set_weights(snapshot, request.pool, now, version=version, source=source, barrier=barrier)

        _, after = await self._leader.execute(order)
        return pb.SetWeightsResponse(pool=self._pool(after, request.pool))

    async def CancelWorker(self, request: pb.CancelWorkerRequest, context: Any) -> pb.CancelWorkerResponse:
        _, after = await self._leader.execute(lambda s, now: orders.cancel_worker(s, request.worker_id, now))
        return pb.CancelWorkerResponse(worker=self._worker(after, request.worker_id))

    # ------------------------------------------------------------------ nodes

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        snapshot = await self._leader.snapshot()
        nodes = [self._node(snapshot, node_id) for node_id in sorted(snapshot.nodes)]
        return pb.ListNodesResponse(nodes=nodes, revision=snapshot.revision)

    async def CordonNode(self, request: pb.CordonNodeRequest, context: Any) -> pb.CordonNodeResponse:
        def order(snapshot: Snapshot, now: float) -> Plan:
            return orders.cordon_node(snapshot, request.node_id, now, reason=request.reason)

        _, after = await self._leader.execute(order)
        return pb.CordonNodeResponse(node=self._node(after, request.node_id))

    async def UncordonNode(self, request: pb.UncordonNodeRequest, context: Any) -> pb.UncordonNodeResponse:
        _, after = await self._leader.execute(lambda s, now: orders.uncordon_node(s, request.node_id, now))
        return pb.UncordonNodeResponse(node=self._node(after, request.node_id))

    async def NoticeNode(self, request: pb.NoticeNodeRequest, context: Any) -> pb.NoticeNodeResponse:
        in_s = None if request.withdraw else max(0.0, _seconds(request.until_gone))
        _, after = await self._leader.execute(lambda s, now: orders.notice_node(s, request.node_id, now, in_s))
        return pb.NoticeNodeResponse(node=self._node(after, request.node_id))

    # ------------------------------------------------------------------ history

    async def ListDecisions(self, request: pb.ListDecisionsRequest, context: Any) -> pb.ListDecisionsResponse:
        limit = _limit(request.limit, *_DECISIONS)
        found = await self._store.decisions(request.pool, limit, request.skip_holds)
        return pb.ListDecisionsResponse(decisions=[decision_to_proto(decision) for decision in found])

    async def PreviewScaling(self, request: pb.PreviewScalingRequest, context: Any) -> pb.PreviewScalingResponse:
        return preview_scaling(await self._leader.snapshot(), request, self._clock.now())

    async def ExplainDecision(self, request: pb.ExplainDecisionRequest, context: Any) -> pb.ExplainDecisionResponse:
        return await explain_decision(self._store, await self._leader.snapshot(), request)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> pb.ListEventsResponse:
        found = await self._store.events(request.pool, _limit(request.limit, *_EVENTS), request.after_event_id)
        return pb.ListEventsResponse(events=[event_to_proto(event) for event in found])

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        after = request.after_event_id if request.HasField("after_event_id") else None
        async for event in follow_events(self._store, self._hub, request.pool, after):
            yield pb.WatchEventsResponse(event=event_to_proto(event))

    # ------------------------------------------------------------------ figures

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        figures = views.metrics(await self._leader.snapshot(), request.pool, self._clock.now())
        return pb.GetMetricsResponse(
            active_workers=figures.active_workers,
            draining_workers=figures.draining_workers,
            total_workers=figures.total_workers,
            active_requests=figures.active_requests,
            pending_requests=figures.pending_requests,
            load_ratio=figures.load_ratio,
            total_capacity=figures.total_capacity,
        )

    async def GetSummary(self, request: pb.GetSummaryRequest, context: Any) -> pb.GetSummaryResponse:
        counts = views.summary(await self._leader.snapshot())
        return pb.GetSummaryResponse(
            active_instances=counts.active_instances,
            scaling_up_instances=counts.scaling_up_instances,
            draining_instances=counts.draining_instances,
            active_servers=counts.active_servers,
            scaling_up_servers=counts.scaling_up_servers,
            pending_server_scale_downs=counts.pending_server_scale_downs,
            total_servers=counts.total_servers,
            total_instances=counts.total_instances,
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return status_message(await self._leader.snapshot(), self._clock.now(), __version__)

    async def CreateJoinToken(self, request: pb.CreateJoinTokenRequest, context: Any) -> pb.CreateJoinTokenResponse:
        return create_join_token(self._door, request, self._clock.now())

    # ------------------------------------------------------------------ what they share

    def _pool(self, snapshot: Snapshot, name: str) -> types_pb2.Pool:
        return pool_message(snapshot, orders.pool_named(snapshot, name), self._clock.now())

    def _worker(self, snapshot: Snapshot, worker_id: str) -> types_pb2.Worker:
        return worker_message(snapshot, orders.worker_named(snapshot, worker_id), self._clock.now())

    def _node(self, snapshot: Snapshot, node_id: str) -> types_pb2.Node:
        return node_message(snapshot, orders.node_named(snapshot, node_id), self._clock.now())


def _delete_pool(snapshot: Snapshot, now: float, name: str, drain: bool) -> Plan:
    return orders.delete_pool(snapshot, name, now, drain_workers=drain)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _limit(asked: int, default: int, most: int) -> int:
    return min(count(asked, "limit") or default, most)
