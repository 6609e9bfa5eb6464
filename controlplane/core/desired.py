"""What is wanted of a node, derived from the records and, for engines that no record holds, from its reports."""

from controlplane.core.fences import has_ended
from controlplane.core.snapshot import Snapshot
from controlplane.core.worker import holds_slice, id_order, order_of
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import State, Want
from springtide.model.pool import Pool
from springtide.model.worker import Worker, WorkerReport

__all__ = ["DesiredWorker", "EngineLaunch", "desired_workers", "launch_of"]


def desired_workers(snapshot: Snapshot, node_id: str) -> tuple[DesiredWorker, ...]:
    """All that this store wants of the node, in id order. A LOST worker is left out, which leaves it as it is; so is
    whatever belongs to another store. An engine of ours that no record holds here is to be stopped."""
    wanted: dict[str, DesiredWorker] = {}
    for worker in snapshot.workers.values():
        if worker.intent.node_id == node_id and _concerns_node(worker):
            desired = _from_record(snapshot, worker)
            if desired is not None:
                wanted[worker.worker_id] = desired
    live = snapshot.live.nodes.get(node_id)
    for report in live.reports.values() if live is not None else ():
        if report.store_id == snapshot.store_id and report.worker_id not in wanted and not has_ended(report):
            stray = _stray(snapshot, report, node_id)
            if stray is not None:
                wanted[report.worker_id] = stray
    return tuple(wanted[worker_id] for worker_id in sorted(wanted, key=id_order))


def _concerns_node(worker: Worker) -> bool:
    return worker.state is not State.INACTIVE or holds_slice(worker)


def _from_record(snapshot: Snapshot, worker: Worker) -> DesiredWorker | None:
    order = order_of(worker.intent)
    if order.want is None:
        return None
    pool = snapshot.pools.get(worker.pool)
    return DesiredWorker(
        worker_id=worker.worker_id,
        pool=worker.pool,
        generation=worker.intent.generation,
        want=order.want,
        paused=order.paused,
        abort_in_flight=order.abort_in_flight,
        kill=order.kill,
        launch=launch_of(pool, worker) if pool is not None else EngineLaunch(gpu_ids=worker.intent.gpu_ids),
        traceparent=worker.intent.traceparent,
        after_incarnation=worker.observed.incarnation if order.want is Want.RUN or order.start_asleep else 0,
        sleep_level=order.sleep_level,
        start_asleep=order.start_asleep,
        weight_version=order.weight_version,
        weight_source=worker.intent.weight_source if order.weight_version else "",
    )


def _stray(snapshot: Snapshot, report: WorkerReport, node_id: str) -> DesiredWorker | None:
    """STOP for an engine of this store that runs where no record wants it."""
    record = snapshot.workers.get(report.worker_id)
    if record is not None and record.intent.node_id == node_id and order_of(record.intent).want is None:
        return None  # LOST and back: the next plan adopts or stops it
    same_node = record is not None and record.intent.node_id == node_id
    generation = max(report.generation, record.intent.generation) if same_node and record else report.generation
    return DesiredWorker(
        report.worker_id, report.pool, generation, Want.STOP, launch=EngineLaunch(gpu_ids=report.gpu_ids)
    )


def launch_of(pool: Pool, worker: Worker) -> EngineLaunch:
    """The launch of a worker of the pool on its slice."""
    spec = pool.spec
    return EngineLaunch(
        engine=spec.engine,
        model=spec.model,
        served_model_name=spec.model_name,
        tensor_parallel_size=spec.tensor_parallel_size,
        gpu_ids=worker.intent.gpu_ids,
        engine_args=spec.engine_args,
        engine_env=spec.engine_env,
        interpreter=spec.interpreter,
        max_in_flight=spec.max_in_flight,
        start_timeout_s=spec.start_timeout_s,
        stop_grace_s=spec.stop_grace_s,
        weight_version=pool.intent.weight_version,
    )
