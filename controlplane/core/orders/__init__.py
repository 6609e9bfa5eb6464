"""Operators' orders as plans: (snapshot, arguments, now) -> Plan, or an error that names field, value and remedy.

An order changes what operators own (spec, pins, holds, cordons), or moves one worker by an edge of the machine. The
loop does the rest. Services commit the plan with compare and try again on Conflict.
"""

from controlplane.core.orders.lookup import node_named, pool_named, worker_named
from controlplane.core.orders.nodes import cordon_node, notice_node, uncordon_node
from controlplane.core.orders.pools import apply_pool, delete_pool, pause_pool, resume_pool, scale_pool, set_weights
from controlplane.core.orders.workers import (
    activate_worker,
    cancel_worker,
    drain_worker,
    lend_worker,
    pause_worker,
    reclaim_worker,
    resume_worker,
    sleep_worker,
    undrain_worker,
)

__all__ = [
    "activate_worker",
    "apply_pool",
    "cancel_worker",
    "cordon_node",
    "delete_pool",
    "drain_worker",
    "lend_worker",
    "node_named",
    "notice_node",
    "pause_pool",
    "pause_worker",
    "pool_named",
    "reclaim_worker",
    "resume_pool",
    "resume_worker",
    "scale_pool",
    "set_weights",
    "sleep_worker",
    "uncordon_node",
    "undrain_worker",
    "worker_named",
]
