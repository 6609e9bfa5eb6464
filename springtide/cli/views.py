"""What the records look like as tables and as one record's page."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from springtide.cli import text
from springtide.cli.shape import name_of
from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import generation_pb2 as gen
from springtide.v1.types_pb2 import Decision, Event, Node, PolicySpec, Pool, PoolSpec, RoutingSpec, Worker


def optional(message: Any, field: str) -> Any:
    """The value of an optional field, or None when it is unknown."""
    return getattr(message, field) if message.HasField(field) else None


def pools(items: Iterable[Pool]) -> str:
    counts = ("DESIRED", "ACTIVE", "STARTING", "DRAINING", "MIN-MAX", "IN-FLIGHT", "WAITING", "LOAD")
    rows = [_pool_row(pool) for pool in items]
    empty = "No pools. Create one with `springtide apply FILE`."
    return text.table(("POOL", "ENGINE", "TP", *counts, "NOTE"), rows, empty=empty)


def _pool_row(pool: Pool) -> Sequence[str]:
    spec, status = pool.spec, pool.status
    notes = list(status.conditions)
    if status.HasField("manual_workers"):
        notes.insert(0, f"pinned at {status.manual_workers}")
    if status.HasField("hold_until"):
        notes.insert(0, f"paused for {text.remaining(status.hold_until)}: {status.hold_reason}".removesuffix(": "))
    return (
        spec.name,
        spec.engine,
        str(spec.tensor_parallel_size or 1),
        str(status.desired_workers),
        str(status.active),
        str(status.starting),
        str(status.draining),
        f"{spec.min_workers}-{spec.max_workers}",
        text.number(optional(status, "in_flight")),
        text.number(optional(status, "waiting")),
        text.number(optional(status, "load_ratio"), 2),
        "; ".join(notes),
    )


def pool_page(pool: Pool) -> str:
    spec, status = pool.spec, pool.status
    counts = (f"{status.active} active", f"{status.starting} starting", f"{status.draining} draining")
    return text.pairs(
        [
            ("pool", spec.name),
            ("model", spec.model),
            ("served as", spec.served_model_name or spec.name),
            ("engine", f"{spec.engine}, tensor-parallel size {spec.tensor_parallel_size or 1}"),
            ("engine args", " ".join(spec.engine_args)),
            ("bounds", f"{spec.min_workers} to {spec.max_workers} workers"),
            ("policy", _with_settings(spec.policy)),
            ("routing", _with_settings(spec.routing)),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(spec.labels.items()))),
            ("desired", status.desired_workers),
            ("workers", ", ".join((*counts, f"{status.inactive} inactive ({status.sleeping} asleep)"))),
            ("scale-down", _scale_down(spec)),
            ("spares", spec.spares or ""),
            ("weights", _weights(pool)),
            ("pinned at", optional(status, "manual_workers")),
            ("paused for", text.remaining(status.hold_until) if status.HasField("hold_until") else ""),
            ("paused because", status.hold_reason),
            ("in-flight", text.number(optional(status, "in_flight"))),
            ("waiting", text.number(optional(status, "waiting"))),
            ("load ratio", text.number(optional(status, "load_ratio"), 2)),
            ("capacity", f"{status.total_capacity} requests"),
            ("conditions", "; ".join(status.conditions)),
            ("revision", pool.revision),
        ]
    )


def _scale_down(spec: PoolSpec) -> str:
    how = name_of(spec, "scale_down").lower()
    if how == "sleep_then_stop":
        how += f" after {text.duration(spec.sleep_stop_after_s)}"
    return f"{how}, GPUs of sleepers are lent" if spec.lend_gpus else how


def _weights(pool: Pool) -> str:
    status = pool.status
    if not status.weight_version:
        return ""
    behind = f", {status.weights_behind} workers behind" if status.weights_behind else ""
    return f"{status.weight_version} from {status.weight_source or pool.spec.model}{behind}"


def _with_settings(spec: PolicySpec | RoutingSpec) -> str:
    settings = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in spec.settings.items())
    return f"{spec.name} {settings}".strip()


SORTS: dict[str, Callable[[Worker], Any]] = {
    "id": lambda w: w.worker_id,
    "state": lambda w: (w.state, w.worker_id),
    "in-flight": lambda w: (-w.in_flight, w.worker_id),
    "queued": lambda w: (-w.engine_waiting, w.worker_id),
    "kv": lambda w: (-w.kv_use, w.worker_id),
    "age": lambda w: (w.state_since.seconds, w.worker_id),
    "node": lambda w: (w.node_id, w.worker_id),
}


def state_of(worker: Worker) -> str:
    """`STARTING/LOADING`, `ACTIVE`, `ACTIVE SUSPECT`, `ACTIVE PAUSED`."""
    state, phase = name_of(worker, "state"), name_of(worker, "phase")
    if state != "ACTIVE":
        return f"{state}/{phase}" if phase else state
    extra = [
        word
        for word in (name_of(worker, "condition"), name_of(worker, "admission"))
        if word not in ("", "HEALTHY", "OPEN")
    ]
    return " ".join(["ACTIVE", *extra])


def workers(items: Iterable[Worker], *, sort: str = "id", wide: bool = False) -> str:
    header: tuple[str, ...] = (
        "WORKER",
        "POOL",
        "NODE",
        "GPUS",
        "STATE",
        "FOR",
        "REASON",
        "IN-FLIGHT",
        "QUEUED",
        "KV",
        "SERVED",
        "ENDPOINT",
    )
    if wide:
        header += ("FREED", "RETAKEN", "LENT TO", "ATTEMPTS", "WEIGHTS", "CONFINED", "LAST START")
    rows = [
        (
            w.worker_id,
            w.pool,
            w.node_id or text.UNKNOWN,
            ",".join(w.gpu_ids) or text.UNKNOWN,
            state_of(w),
            text.age(w.state_since),
            w.reason,
            _of(text.number(optional(w, "in_flight")), w.max_in_flight),
            text.number(optional(w, "engine_waiting")),
            text.share(optional(w, "kv_use")),
            text.number(optional(w, "total_served")),
            w.endpoint or text.UNKNOWN,
            *(_wide(w) if wide else ()),
        )
        for w in sorted(items, key=SORTS[sort])
    ]
    return text.table(header, rows, empty="No workers.")


def _wide(w: Worker) -> Sequence[str]:
    unknown = text.UNKNOWN
    memory = (_mib(optional(w, "freed_bytes")), _mib(optional(w, "reoccupied_bytes")), w.lent_to or unknown)
    return (*memory, str(w.attempts), w.weight_version or unknown, w.confinement or unknown, phases(w) or unknown)


PHASES = ("slot", "process", "import", "load", "compile", "warm_up")


def phases(worker: Worker) -> str:
    """Seconds of its last start, phase by phase; what nobody told is left out."""
    found = worker.start_phases_s
    parts = [f"{name} {found[name]:.1f}s" for name in PHASES if found.get(name, 0.0) >= 0.05]
    return " ".join(parts)


def _mib(value: int | None) -> str:
    return text.UNKNOWN if value is None else f"{value / 2**20:.0f} MiB"


def _of(shown: str, limit: int) -> str:
    return f"{shown}/{limit}" if limit else shown


def worker_page(worker: Worker) -> str:
    rows: list[tuple[str, object]] = [
        ("worker", worker.worker_id),
        ("pool", worker.pool),
        ("engine", worker.engine),
        ("node", f"{worker.node_id} GPUs {','.join(worker.gpu_ids)}" if worker.node_id else "not placed"),
        ("state", f"{state_of(worker)} for {text.age(worker.state_since)}"),
        ("reason", f"{worker.reason} {worker.message}".strip()),
        ("deadline", f"in {text.remaining(worker.deadline)}" if worker.HasField("deadline") else ""),
        ("endpoint", worker.endpoint),
        ("in-flight", _of(text.number(optional(worker, "in_flight")), worker.max_in_flight)),
        ("running", text.number(optional(worker, "engine_running"))),
        ("queued", text.number(optional(worker, "engine_waiting"))),
        ("KV use", text.share(optional(worker, "kv_use"))),
        ("served", text.number(optional(worker, "total_served"))),
        ("generation", f"{worker.generation}, observed {worker.observed_generation}"),
        ("incarnation", worker.incarnation or ""),
        ("failed starts", worker.attempts or ""),
        ("last start", phases(worker)),
        ("confined by", worker.confinement),
        ("weights", worker.weight_version),
        ("freed by its sleep", _mib(worker.freed_bytes) if worker.HasField("freed_bytes") else ""),
        ("taken by its wake", _mib(worker.reoccupied_bytes) if worker.HasField("reoccupied_bytes") else ""),
        ("lent to", worker.lent_to),
        ("its engine lacks", "; ".join(f"{k}: {v}" for k, v in sorted(worker.missing_verbs.items()))),
        ("log", worker.log_path),
        ("traceparent", worker.traceparent),
    ]
    if worker.HasField("exit"):
        rows.append(("last exit", f"{worker.exit.reason} {worker.exit.message}".strip()))
    page = text.pairs(rows)
    tail = worker.exit.log_tail.strip() if worker.HasField("exit") else ""
    return f"{page}\n\nend of its log:\n{tail}" if tail else page


def nodes(items: Iterable[Node]) -> str:
    header = ("NODE", "STATE", "FOR", "REASON", "GPUS", "FREE", "FROM", "ADDRESS", "HEARTBEAT", "LABELS", "NOTE")
    rows = [
        (
            n.node_id,
            name_of(n, "state"),
            text.age(n.state_since),
            n.reason or text.UNKNOWN,
            f"{len(n.gpus)}{' simulated' if any(g.simulated for g in n.gpus) else ''}",
            str(len(n.free_gpus)),
            f"{n.provisioner_id}/{n.capability_set}" if n.provisioner_id else text.UNKNOWN,
            n.address or text.UNKNOWN,
            f"{n.heartbeat_age_s:.1f}s ago" if n.HasField("heartbeat_age_s") else text.UNKNOWN,
            ",".join(f"{k}={v}" for k, v in sorted(n.labels.items())) or text.UNKNOWN,
            _node_note(n),
        )
        for n in sorted(items, key=lambda n: n.node_id)
    ]
    return text.table(header, rows, empty="No nodes. Start an agent: `springtide nodeagent --help`.")


def _node_note(node: Node) -> str:
    notes = [f"cordoned: {node.cordon_reason}".removesuffix(": ")] if node.cordoned else []
    if node.HasField("ends_at"):
        notes.append(f"taken away in {text.remaining(node.ends_at)}")
    if node.reference:
        notes.append(node.reference)
    if node.spot:
        notes.append("spot")
    if node.HasField("ends_at"):
        notes.append(f"ends in {text.remaining(node.ends_at)}")
    if node.HasField("register_deadline"):
        notes.append(f"given back unless it registers within {text.remaining(node.register_deadline)}")
    if node.foreign_workers:
        notes.append(f"{node.foreign_workers} foreign workers")
    return "; ".join(notes)


def provisioners(items: Iterable[cp.ProvisionerStatus]) -> str:
    header = (
        "PROVISIONER",
        "KIND",
        "REPORT",
        "SET",
        "GPUS",
        "DESIRED",
        "CONNECTED",
        "PENDING",
        "RELEASING",
        "MAX",
        "NOTE",
    )
    rows = [row for item in items for row in _provisioner_rows(item)]
    return text.table(header, rows, empty="No provisioners. Start one: `springtide provisioner --help`.")


def _provisioner_rows(item: cp.ProvisionerStatus) -> Iterable[Sequence[str]]:
    report = f"{item.report_age_s:.1f}s ago" if item.connected else "not connected"
    for kind in item.sets or [cp.ProvisionerSetStatus()]:
        found = kind.capability_set
        yield (
            item.provisioner_id,
            item.kind or text.UNKNOWN,
            report,
            found.name or text.UNKNOWN,
            str(found.gpus_per_node),
            str(kind.desired),
            str(kind.connected),
            str(kind.pending),
            str(kind.releasing),
            str(found.max_nodes),
            _set_note(kind),
        )


def _set_note(kind: cp.ProvisionerSetStatus) -> str:
    found = kind.capability_set
    notes = ["spot"] if found.spot else []
    if found.keep_nodes:
        notes.append(f"keeps {found.keep_nodes}")
    if found.nodes_per_unit > 1:
        notes.append(f"units of {found.nodes_per_unit}")
    if found.cost_per_hour:
        notes.append(f"{found.cost_per_hour:g} per hour")
    if kind.lost:
        notes.append(f"{kind.lost} lost")
    if kind.HasField("blocked_until"):
        notes.append(f"rests for {text.remaining(kind.blocked_until)}: nodes did not come")
    return "; ".join(notes)


def routers(items: Iterable[cp.RouterStatus]) -> str:
    header = ("ROUTER", "ACKED REVISION", "REPORT", "WAITING")
    rows = [
        (
            r.router_id,
            str(r.acked_revision),
            f"{r.report_age_s:.1f}s ago",
            str(r.waiting) if r.HasField("waiting") else text.UNKNOWN,
        )
        for r in items
    ]
    return text.table(header, rows, empty="No routers.")


def status(answer: cp.GetStatusResponse) -> str:
    head = f"springtide {answer.version}  revision {answer.revision}  store {answer.store_id}"
    if answer.HasField("grace_until") and answer.grace_until.seconds:
        head += f"  grace for {text.remaining(answer.grace_until)}: no lease expires"
    parts = [head, pools(answer.pools), workers(answer.workers), nodes(answer.nodes), routers(answer.routers)]
    if answer.provisioners:
        parts.insert(4, provisioners(answer.provisioners))
    return "\n\n".join(parts)


def decisions(items: Iterable[Decision]) -> str:
    header = ("AT", "POOL", "RESULT", "WORKERS", "TIMES", "REASON", "MESSAGE")
    rows = [
        (
            text.clock(d.at),
            d.pool,
            name_of(d, "result"),
            f"{d.from_workers}->{d.to_workers}",
            str(max(1, d.count)),
            d.reason,
            d.message,
        )
        for d in items
    ]
    return text.table(header, rows, empty="No decisions yet.")


EVENT_HEADER = ("TIME", "ACTION", "TARGET", "STATUS", "POOL", "REASON", "MESSAGE")


def event_row(event: Event) -> Sequence[str]:
    return (text.clock(event.at), event.action, event.target, event.status, event.pool, event.reason, event.message)


def events(items: Iterable[Event]) -> str:
    return text.table(EVENT_HEADER, [event_row(e) for e in items], empty="No events yet.")


def event_csv_row(event: Event) -> Sequence[str]:
    """The fourth seed's columns; time is seconds since the epoch."""
    return (f"{text.seconds_of(event.at):.3f}", event.action, event.target, event.status)


def models(items: Iterable[gen.Model]) -> str:
    rows = [(m.name, m.pool, m.engine, str(m.active_workers)) for m in items]
    return text.table(("MODEL", "POOL", "ENGINE", "ACTIVE"), rows, empty="No models.")
