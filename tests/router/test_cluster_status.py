"""`/cluster_status`: the view of one pool that scripts of a SLURM scheduler read."""

import orjson
import pytest

from router.cluster_status import ClusterStatus, cluster_status
from springtide.dataplane import Reply, Request
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import provisioner_pb2 as pv
from springtide.v1 import types_pb2 as t

NOW = 1_800_000_000.0


def status() -> cp.GetStatusResponse:
    spec = t.PoolSpec(name="llama", served_model_name="meta/Llama", engine="vllm", tensor_parallel_size=4)
    kind = pv.CapabilitySet(name="slurm", gpus_per_node=8, max_nodes=17, keep_nodes=16)
    here = t.Node(node_id="n-1", state=t.NODE_STATE_UP, reference="4711", heartbeat_age_s=2.0)
    here.labels["slurm/node"] = "gpu-17"
    workers = [
        t.Worker(worker_id="w-1", pool="llama", node_id="n-1", state=t.WORKER_STATE_ACTIVE, endpoint="10.0.0.7:8001"),
        t.Worker(worker_id="w-2", state=t.WORKER_STATE_STARTING, phase=t.WORKER_PHASE_LOADING),
        t.Worker(worker_id="w-3", state=t.WORKER_STATE_STARTING, phase=t.WORKER_PHASE_REQUESTED),
        t.Worker(worker_id="w-4", state=t.WORKER_STATE_INACTIVE, phase=t.WORKER_PHASE_LOST),
        t.Worker(worker_id="w-5", state=t.WORKER_STATE_INACTIVE, phase=t.WORKER_PHASE_STOPPED),
        t.Worker(worker_id="w-6", state=t.WORKER_STATE_ACTIVE, admission=t.WORKER_ADMISSION_PAUSED),
    ]
    for worker in workers:
        worker.pool = "llama"
    workers[0].gpu_ids.extend(["0", "1", "2", "3"])
    workers[0].total_served = 12
    return cp.GetStatusResponse(
        pools=[t.Pool(spec=spec)],
        nodes=[here, t.Node(node_id="n-2", state=t.NODE_STATE_REQUESTED)],
        workers=[*workers, t.Worker(worker_id="o-1", pool="other", state=t.WORKER_STATE_ACTIVE)],
        provisioners=[cp.ProvisionerStatus(sets=[cp.ProvisionerSetStatus(capability_set=kind)])],
    )


def test_the_shape() -> None:
    """CM3: every field of the seed's view, counted over what runs or should; unknown is null."""
    found = status()
    view = cluster_status(found, found.pools[0], NOW)
    workers = view.pop("workers")
    assert view == {
        "model": "meta/Llama",
        "engine": "vllm",
        "max_nodes": 16,
        "tensor_parallel_size": 4,
        "dp_per_node": 2,
        "total_nodes_active": 1,
        "total_workers": 5,
        "ready_workers": 1,
        "loading_workers": 2,
        "offline_workers": 2,
        "pending_slurm_jobs": 1,
    }
    assert isinstance(workers, list)
    assert workers[0] == {
        "worker_id": "w-1",
        "hostname": "gpu-17",
        "ip_address": "10.0.0.7",
        "port": 8001,
        "base_url": "http://10.0.0.7:8001",
        "status": "READY",
        "engine": "vllm",
        "model_name": "meta/Llama",
        "n_gpus": 4,
        "tensor_parallel_size": 4,
        "slurm_job_id": "4711",
        "registered_at": None,
        "last_heartbeat": "2027-01-15T07:59:58+00:00",
        "requests_served": 12,
    }
    assert [worker["status"] for worker in workers] == ["READY", "LOADING", "STARTING", "OFFLINE", "OFFLINE"]
    assert workers[1]["requests_served"] is None


@pytest.mark.timeout(30)
async def test_without_a_control_plane() -> None:
    """CM3: a clear answer that may be tried again."""
    reply = await ClusterStatus("127.0.0.1:1").reply(Request("GET", "/cluster_status", [], b""))
    assert isinstance(reply, Reply)
    assert reply.status == 503
    assert orjson.loads(reply.body)["error"]["message"]
