"""`/cluster_status` and `/workers`: a pool in the shape that scripts of a SLURM scheduler read. A view, no control.

Everything comes from one GetStatus of the control plane, kept for a second; without a control plane it is a 503.
"""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qs

import orjson

from springtide.client.asynchronous import AsyncSpringtide
from springtide.dataplane import Reply, Request
from springtide.errors import NotFound, SpringtideError
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t

KEPT_S = 1.0
TIMEOUT_S = 5.0
ROUTES = ("/cluster_status", "/workers")
_JSON = ((b"content-type", b"application/json"),)
_OFFLINE, _READY, _LOADING, _STARTING = "OFFLINE", "READY", "LOADING", "STARTING"
_LOADS = frozenset(
    (
        t.WORKER_PHASE_LOADING,
        t.WORKER_PHASE_SYNCING_WEIGHTS,
        t.WORKER_PHASE_WARMING,
        t.WORKER_PHASE_ADOPTING,
    )
)


class ClusterStatus:
    """`address`: the control plane's gRPC address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._found: cp.GetStatusResponse | None = None
        self._found_at = 0.0
        self._asking = asyncio.Lock()

    async def reply(self, request: Request) -> Reply:
        """`?pool=NAME` or `?model=NAME` picks one of several pools."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._status()
            query = parse_qs(request.query)
            pool = _pick(found, query.get("pool", [""])[0], query.get("model", [""])[0])
        except TimeoutError:
            return _error(503, "The control plane does not answer.", "controlplane_away")
        except SpringtideError as error:
            return Reply(error.http_status, _JSON, orjson.dumps(error.openai_body()))
        shown = cluster_status(found, pool, time.time())
        return Reply(200, _JSON, orjson.dumps(shown["workers"] if request.path == "/workers" else shown))

    async def _status(self) -> cp.GetStatusResponse:
        async with self._asking:
            if self._found is None or time.monotonic() - self._found_at > KEPT_S:
                async with AsyncSpringtide(self._address) as client:
                    self._found = await client.status()
                self._found_at = time.monotonic()
            return self._found


def _pick(found: cp.GetStatusResponse, name: str, model: str) -> t.Pool:
    pools = sorted(found.pools, key=lambda pool: pool.spec.name)
    for pool in pools:
        if (not name or pool.spec.name == name) and (
            not model or model in (pool.spec.served_model_name, pool.spec.name)
        ):
            return pool
    raise NotFound(kind="pool", name=name or model or "*", known=[pool.spec.name for pool in pools])


def cluster_status(found: cp.GetStatusResponse, pool: t.Pool, now: float) -> dict[str, object]:
    """The view of one pool. `now`: seconds since the epoch."""
    nodes = {node.node_id: node for node in found.nodes}
    workers = [
        _worker(worker, nodes.get(worker.node_id, t.Node()), pool, now)
        for worker in found.workers
        if worker.pool == pool.spec.name and _is_here(worker)
    ]
    sets = [one.capability_set for provisioner in found.provisioners for one in provisioner.sets]
    gpus = max((kind.gpus_per_node for kind in sets), default=0)
    gpus = gpus or max((len(node.gpus) for node in found.nodes), default=0)
    counts: Mapping[str, int] = {
        status: sum(worker["status"] == status for worker in workers)
        for status in (_READY, _LOADING, _STARTING, _OFFLINE)
    }
    tp = max(1, pool.spec.tensor_parallel_size)
    return {
        "model": pool.spec.served_model_name or pool.spec.model,
        "engine": pool.spec.engine,
        "max_nodes": sum(kind.keep_nodes or kind.max_nodes for kind in sets) or len(found.nodes),
        "tensor_parallel_size": tp,
        "dp_per_node": gpus // tp,
        "total_nodes_active": sum(node.state == t.NODE_STATE_UP for node in found.nodes),
        "total_workers": len(workers),
        "ready_workers": counts[_READY],
        "loading_workers": counts[_LOADING] + counts[_STARTING],
        "offline_workers": counts[_OFFLINE],
        "pending_slurm_jobs": sum(node.state == t.NODE_STATE_REQUESTED for node in found.nodes),
        "workers": workers,
    }


def _is_here(worker: t.Worker) -> bool:
    """A stopped worker's record stays for a while; scripts count what runs, or should."""
    stopped = worker.state == t.WORKER_STATE_INACTIVE and worker.phase == t.WORKER_PHASE_STOPPED
    return not stopped


def _status(worker: t.Worker) -> str:
    if worker.state == t.WORKER_STATE_ACTIVE:
        return _READY if worker.admission != t.WORKER_ADMISSION_PAUSED else _OFFLINE
    if worker.state == t.WORKER_STATE_STARTING:
        return _LOADING if worker.phase in _LOADS else _STARTING
    return _OFFLINE


def _worker(worker: t.Worker, node: t.Node, pool: t.Pool, now: float) -> dict[str, object]:
    host, _, port = worker.endpoint.rpartition(":")
    age_s = node.heartbeat_age_s if node.HasField("heartbeat_age_s") else None
    return {
        "worker_id": worker.worker_id,
        "hostname": node.labels.get("slurm/node") or node.node_id or worker.node_id,
        "ip_address": host or node.address,
        "port": int(port) if port.isdigit() else 0,
        "base_url": f"http://{worker.endpoint}" if worker.endpoint else "",
        "status": _status(worker),
        "engine": worker.engine or pool.spec.engine,
        "model_name": pool.spec.served_model_name or pool.spec.model,
        "n_gpus": len(worker.gpu_ids),
        "tensor_parallel_size": max(1, pool.spec.tensor_parallel_size),
        "slurm_job_id": node.reference or node.labels.get("slurm/job", ""),
        "registered_at": worker.state_since.ToJsonString() if worker.HasField("state_since") else None,
        "last_heartbeat": None if age_s is None else datetime.fromtimestamp(now - age_s, UTC).isoformat(),
        "requests_served": worker.total_served if worker.HasField("total_served") else None,
    }


def _error(status: int, message: str, code: str) -> Reply:
    body = {"error": {"message": message, "type": "service_unavailable_error", "param": None, "code": code}}
    return Reply(status, (*_JSON, (b"retry-after", b"1")), orjson.dumps(body))
