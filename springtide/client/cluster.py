"""The status of one pool in the shape of the third document's `/cluster_status`, for scripts that read that."""

import time
from typing import Any

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t

_LOADING = (t.WORKER_PHASE_LOADING, t.WORKER_PHASE_SYNCING_WEIGHTS, t.WORKER_PHASE_WARMING, t.WORKER_PHASE_ADOPTING)
_SHOWN_INACTIVE = (t.WORKER_PHASE_FAILED, t.WORKER_PHASE_LOST)


def cluster_status(status: cp.GetStatusResponse, pool: str = "", now: float | None = None) -> dict[str, Any]:
    """Of the named pool, else of the first one by name; without any, an empty cluster. Times are seconds since the
    epoch, unknown is None."""
    now = time.time() if now is None else now
    found = next((p for p in sorted(status.pools, key=lambda p: p.spec.name) if pool in ("", p.spec.name)), None)
    spec = found.spec if found is not None else t.PoolSpec()
    size = spec.tensor_parallel_size or 1
    nodes = {node.node_id: node for node in status.nodes}
    up = [node for node in status.nodes if node.state == t.NODE_STATE_UP]
    workers = [
        _worker(worker, spec, nodes.get(worker.node_id), now)
        for worker in status.workers
        if worker.pool == spec.name and (worker.state != t.WORKER_STATE_INACTIVE or worker.phase in _SHOWN_INACTIVE)
    ]
    counts = [worker["status"] for worker in workers]
    return {
        "model": spec.served_model_name or spec.name,
        "engine": spec.engine,
        "max_nodes": sum(kind.capability_set.max_nodes for p in status.provisioners for kind in p.sets) or len(nodes),
        "tensor_parallel_size": size,
        "dp_per_node": max((len(node.gpus) // size for node in up), default=0),
        "total_nodes_active": len(up),
        "total_workers": len(workers),
        "ready_workers": counts.count("READY"),
        "loading_workers": counts.count("LOADING") + counts.count("STARTING"),
        "offline_workers": counts.count("OFFLINE"),
        "pending_slurm_jobs": sum(1 for node in status.nodes if node.state == t.NODE_STATE_REQUESTED),
        "workers": workers,
    }


def _worker(worker: t.Worker, spec: t.PoolSpec, node: t.Node | None, now: float) -> dict[str, Any]:
    size = spec.tensor_parallel_size or 1
    host, _, port = worker.endpoint.rpartition(":")
    heard_s = node.heartbeat_age_s if node is not None and node.HasField("heartbeat_age_s") else None
    return {
        "worker_id": worker.worker_id,
        "hostname": worker.node_id,
        "ip_address": host or (node.address if node is not None else ""),
        "port": int(port) if port.isdigit() else None,
        "base_url": f"http://{worker.endpoint}/v1" if worker.endpoint else "",
        "status": _status(worker),
        "engine": worker.engine,
        "model_name": spec.served_model_name or spec.name,
        "n_gpus": len(worker.gpu_ids) or size,
        "tensor_parallel_size": size,
        "slurm_job_id": (node.reference if node is not None else "") or None,
        "registered_at": node.state_since.seconds if node is not None and node.HasField("state_since") else None,
        "last_heartbeat": None if heard_s is None else round(now - heard_s, 3),
        "requests_served": worker.total_served if worker.HasField("total_served") else None,
    }


def _status(worker: t.Worker) -> str:
    """STARTING, LOADING, READY or OFFLINE: what no request can be sent to is OFFLINE."""
    if worker.state == t.WORKER_STATE_ACTIVE:
        return "READY"
    if worker.state == t.WORKER_STATE_STARTING:
        return "LOADING" if worker.phase in _LOADING else "STARTING"
    return "OFFLINE"
