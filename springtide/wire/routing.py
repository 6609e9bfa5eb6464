"""routing.proto: the table, its changes, loads, and what routers report, for both ends."""

from collections.abc import Iterable, Sequence

from springtide.errors import InvalidArgument
from springtide.model.enums import Role
from springtide.model.pool import RoutingSpec
from springtide.model.routing import (
    MOST_NEEDS,
    NeedReport,
    PoolReport,
    RoutedPool,
    RoutedWorker,
    RouterReport,
    RoutingDelta,
    RoutingTable,
    WorkerLoad,
    WorkerUse,
)
from springtide.v1 import routing_pb2 as pb
from springtide.v1 import types_pb2 as types_pb
from springtide.wire.pools import role_from_proto, role_to_proto, routing_from_proto, routing_to_proto
from springtide.wire.values import count, identifier


def pool_to_proto(pool: RoutedPool) -> pb.RoutedPool:
    return pb.RoutedPool(
        name=pool.name,
        served_model_name=pool.served_model_name,
        max_waiting=pool.max_waiting,
        waiting_timeout_s=pool.waiting_timeout_s,
        starting=pool.starting,
        max_workers=pool.max_workers,
        engine=pool.engine,
        routing=routing_to_proto(pool.routing),
        role=role_to_proto(pool.role),
        start_up_s=pool.start_up_s,
    )


def pool_from_proto(message: pb.RoutedPool) -> RoutedPool:
    return RoutedPool(
        name=identifier(message.name, "pools.name"),
        served_model_name=message.served_model_name or message.name,
        max_waiting=message.max_waiting,
        waiting_timeout_s=message.waiting_timeout_s,
        starting=message.starting,
        max_workers=message.max_workers,
        engine=message.engine,
        routing=_routing(message.routing),
        role=Role.MIXED if message.role == types_pb.ROLE_UNSPECIFIED else role_from_proto(message.role),
        start_up_s=message.start_up_s if message.HasField("start_up_s") else None,
    )


def _routing(message: types_pb.RoutingSpec) -> RoutingSpec:
    """What this version cannot read of a later one's settings is left out: routers fall back, nothing is fatal."""
    try:
        return routing_from_proto(message, "pools.routing")
    except InvalidArgument:
        return RoutingSpec(message.name)


def worker_to_proto(worker: RoutedWorker) -> pb.RoutedWorker:
    return pb.RoutedWorker(
        worker_id=worker.worker_id,
        pool=worker.pool,
        incarnation=worker.incarnation,
        endpoint=worker.endpoint,
        max_in_flight=worker.max_in_flight,
        ramp_s=worker.ramp_s,
        traceparent=worker.traceparent,
        weight_version=worker.weight_version,
        node_id=worker.node_id,
        labels=dict(worker.labels),
    )


def worker_from_proto(message: pb.RoutedWorker) -> RoutedWorker:
    return RoutedWorker(
        worker_id=identifier(message.worker_id, "workers.worker_id"),
        pool=message.pool,
        incarnation=message.incarnation,
        endpoint=message.endpoint,
        max_in_flight=message.max_in_flight,
        ramp_s=message.ramp_s,
        traceparent=message.traceparent,
        weight_version=message.weight_version,
        node_id=message.node_id,
        labels=dict(message.labels),
    )


def snapshot_to_proto(table: RoutingTable) -> pb.RoutingSnapshot:
    return pb.RoutingSnapshot(
        store_id=table.store_id,
        revision=table.revision,
        pools=[pool_to_proto(pool) for pool in table.pools.values()],
        workers=[worker_to_proto(worker) for worker in table.workers.values()],
    )


def snapshot_from_proto(message: pb.RoutingSnapshot) -> RoutingTable:
    pools = [pool_from_proto(pool) for pool in message.pools]
    workers = [worker_from_proto(worker) for worker in message.workers]
    return RoutingTable(
        store_id=message.store_id,
        revision=message.revision,
        pools={pool.name: pool for pool in pools},
        workers={worker.worker_id: worker for worker in workers},
    )


def delta_to_proto(delta: RoutingDelta) -> pb.RoutingDelta:
    return pb.RoutingDelta(
        store_id=delta.store_id,
        revision=delta.revision,
        pools=[pool_to_proto(pool) for pool in delta.pools],
        removed_pools=delta.removed_pools,
        workers=[worker_to_proto(worker) for worker in delta.workers],
        removed_workers=delta.removed_workers,
    )


def delta_from_proto(message: pb.RoutingDelta) -> RoutingDelta:
    return RoutingDelta(
        store_id=message.store_id,
        revision=message.revision,
        pools=tuple(pool_from_proto(pool) for pool in message.pools),
        removed_pools=tuple(message.removed_pools),
        workers=tuple(worker_from_proto(worker) for worker in message.workers),
        removed_workers=tuple(message.removed_workers),
    )


def loads_to_proto(loads: Iterable[WorkerLoad]) -> pb.RoutingLoads:
    return pb.RoutingLoads(
        workers=[
            pb.WorkerLoad(
                worker_id=load.worker_id, incarnation=load.incarnation, in_flight=load.in_flight, kv_use=load.kv_use
            )
            for load in loads
        ]
    )


def loads_from_proto(message: pb.RoutingLoads) -> tuple[WorkerLoad, ...]:
    return tuple(
        WorkerLoad(
            worker_id=load.worker_id,
            incarnation=load.incarnation,
            in_flight=load.in_flight if load.HasField("in_flight") else None,
            kv_use=load.kv_use if load.HasField("kv_use") else None,
        )
        for load in message.workers
    )


def report_to_proto(report: RouterReport) -> pb.RouterReport:
    return pb.RouterReport(
        pools=[
            pb.PoolDemand(
                pool=pool.pool,
                waiting=pool.waiting,
                rejected=pool.rejected,
                oldest_wait_s=pool.oldest_wait_s,
                requests_total=pool.requests_total,
                failed_total=pool.failed_total,
                ttft_p50_s=pool.ttft_p50_s,
                ttft_p99_s=pool.ttft_p99_s,
                by_needs=[
                    pb.NeedDemand(labels=dict(need.labels), waiting=need.waiting, running=need.running)
                    for need in pool.by_needs
                ],
            )
            for pool in report.pools
        ],
        workers=[
            pb.WorkerUse(
                worker_id=use.worker_id,
                incarnation=use.incarnation,
                in_flight=use.in_flight,
                failures_total=use.failures_total,
                requests_total=use.requests_total,
            )
            for use in report.workers
        ],
    )


def report_from_proto(message: pb.RouterReport) -> RouterReport:
    """Raises InvalidArgument for negative counts and for more needs than a report may tell apart."""
    return RouterReport(
        pools=tuple(
            PoolReport(
                pool=pool.pool,
                waiting=count(pool.waiting, "report.pools.waiting"),
                rejected=count(pool.rejected, "report.pools.rejected"),
                oldest_wait_s=pool.oldest_wait_s,
                requests_total=pool.requests_total,
                failed_total=pool.failed_total,
                ttft_p50_s=pool.ttft_p50_s if pool.HasField("ttft_p50_s") else None,
                ttft_p99_s=pool.ttft_p99_s if pool.HasField("ttft_p99_s") else None,
                by_needs=_needs_from_proto(pool.by_needs),
            )
            for pool in message.pools
        ),
        workers=tuple(
            WorkerUse(use.worker_id, use.incarnation, use.in_flight, use.failures_total, use.requests_total)
            for use in message.workers
        ),
    )


def _needs_from_proto(messages: Sequence[pb.NeedDemand]) -> tuple[NeedReport, ...]:
    if len(messages) > MOST_NEEDS:
        raise InvalidArgument(
            field="report.pools.by_needs",
            value=len(messages),
            problem=f"has more than {MOST_NEEDS} entries",
            remedy="Join what is beyond.",
        )
    return tuple(
        NeedReport(
            tuple(sorted(need.labels.items())),
            count(need.waiting, "report.pools.by_needs.waiting"),
            count(need.running, "report.pools.by_needs.running"),
        )
        for need in messages
    )
