"""Snapshots as operators see them: records with counts and live loads, as messages."""

from controlplane.core import views
from controlplane.core.placement import foreign_workers, free_gpus
from controlplane.core.signals import fresh_report, node_end
from controlplane.core.snapshot import Snapshot
from controlplane.services.provisioners import provisioner_messages
from springtide.model.node import Node
from springtide.model.pool import Pool
from springtide.model.worker import Worker
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as pb
from springtide.wire.nodes import node_to_proto
from springtide.wire.pools import pool_spec_to_proto
from springtide.wire.values import timestamp
from springtide.wire.workers import worker_to_proto


def pool_message(snapshot: Snapshot, pool: Pool, now: float) -> pb.Pool:
    """With its counts; a pool that is not recorded (validate_only) has none."""
    message = pb.Pool(spec=pool_spec_to_proto(pool.spec), revision=pool.revision)
    if pool.name in snapshot.pools:
        message.status.CopyFrom(_status(views.pool_status(snapshot, pool.name, now)))
    return message


def _status(status: views.PoolStatus) -> pb.PoolStatus:
    return pb.PoolStatus(
        desired_workers=status.desired_workers,
        active=status.active,
        starting=status.starting,
        draining=status.draining,
        inactive=status.inactive,
        total=status.total,
        pending=status.pending,
        manual_workers=status.manual_workers,
        hold_until=timestamp(status.hold_until),
        hold_reason=status.hold_reason,
        in_flight=status.in_flight,
        waiting=status.waiting,
        load_ratio=status.load_ratio,
        total_capacity=status.total_capacity,
        conditions=status.conditions,
        weight_version=status.weight_version,
        weight_source=status.weight_source,
        sleeping=status.sleeping,
        weights_behind=status.weights_behind,
    )


def worker_message(snapshot: Snapshot, worker: Worker, now: float) -> pb.Worker:
    pool = snapshot.pools.get(worker.pool)
    return worker_to_proto(worker, fresh_report(snapshot, worker, now), pool.spec.engine if pool is not None else "")


def node_message(snapshot: Snapshot, node: Node, now: float) -> pb.Node:
    live = snapshot.live.nodes.get(node.node_id)
    free = free_gpus(node, snapshot.workers.values(), live)
    age_s = None if live is None else max(0.0, now - live.last_heard_at)
    message = node_to_proto(node, free, age_s, foreign_workers(snapshot, node.node_id))
    end = timestamp(node_end(node, live))
    if end is not None:
        message.ends_at.CopyFrom(end)
    return message


def status_message(snapshot: Snapshot, now: float, version: str) -> cp.GetStatusResponse:
    """Everything at one revision."""
    return cp.GetStatusResponse(
        store_id=snapshot.store_id,
        revision=snapshot.revision,
        pools=[pool_message(snapshot, pool, now) for _, pool in sorted(snapshot.pools.items())],
        nodes=[node_message(snapshot, node, now) for _, node in sorted(snapshot.nodes.items())],
        workers=[worker_message(snapshot, worker, now) for worker in views.workers_of(snapshot)],
        routers=router_messages(snapshot, now),
        grace_until=timestamp(snapshot.grace_until) if snapshot.grace_until > now else None,
        version=version,
        provisioners=provisioner_messages(snapshot, now),
    )


def router_messages(snapshot: Snapshot, now: float) -> list[cp.RouterStatus]:
    return [
        cp.RouterStatus(
            router_id=router_id,
            acked_revision=router.acked_revision,
            report_age_s=max(0.0, now - router.last_heard_at),
            waiting=sum(demand.waiting for demand in router.demand.values()) if router.demand else None,
        )
        for router_id, router in sorted(snapshot.live.routers.items())
    ]
