"""Nodes: registration, leases, silence, leaving. And the health of ACTIVE workers as far as silence and probes tell
it."""

import dataclasses

from controlplane.core.draft import Draft
from controlplane.core.snapshot import NodeLive
from controlplane.core.starts import crash_backoff
from controlplane.core.worker import Cause
from springtide.model.enums import Condition, NodeState, State
from springtide.model.node import Node, NodeObserved
from springtide.model.record import Event
from springtide.model.worker import Worker

PROBE_FAILURES_SUSPECT = 3  # in a row
_HERE = frozenset({NodeState.UP, NodeState.RELEASING})
_THIRD_OF_AT_LEAST = 3  # nodes; of fewer, one silent node is already a third


def tend_nodes(draft: Draft) -> None:
    """Node records follow what their agents say; what lives on a node that is lost or gone becomes LOST."""
    for node_id, live in draft.snapshot.live.nodes.items():
        if draft.full:
            return
        _register(draft, node_id, live)
    mass_silence = _mass_silence(draft)
    for node_id in sorted(draft.nodes):
        if draft.full:
            return
        _check_lease(draft, draft.nodes[node_id], mass_silence)
    for worker in [worker for worker in draft.workers.values() if worker.state is not State.INACTIVE]:
        if draft.full:
            return
        _follow_node(draft, worker)


def lease_end(draft: Draft, node: Node, mass_silence: bool) -> float:
    """When the node's silence makes it LOST. After a start or a change of leader nothing has been heard yet: the
    grace period stands in for the last word. When many fall silent at once, the fault is likelier between them and
    us."""
    live = draft.live(node.node_id)
    end = live.last_heard_at + draft.timing.lease_s if live is not None else draft.snapshot.grace_until
    if mass_silence and live is not None:
        end += draft.timing.grace_s
    return max(end, draft.snapshot.grace_until)


def silence_s(draft: Draft, node_id: str) -> float | None:
    """Seconds since the node was heard; None when never since this leader leads."""
    live = draft.live(node_id)
    return draft.now - live.last_heard_at if live is not None else None


def _register(draft: Draft, node_id: str, live: NodeLive) -> None:
    heard = draft.now < live.last_heard_at + draft.timing.lease_s  # exactly as the lease ends, see lease_end
    if live.goodbye or not live.connected or live.hello is None or not heard:
        return
    node = draft.nodes.get(node_id)
    node = _with_notice(draft, node)
    noticed = node is not None and node.spec.ends_at is not None
    state = NodeState.RELEASING if live.stopping or noticed else NodeState.UP
    if node is not None and _is_given_back(node):
        if node.state is not NodeState.RELEASING:
            node = _move(draft, node, NodeState.RELEASING, "COMES_LATE")
            _say(draft, node, live.hello)
    elif node is None:
        node = Node(node_id, state=state, state_since=draft.now, observed=live.hello)
        _say(draft, node, live.hello)
    elif node.state is not state:
        reason = "NOTICE" if noticed else "REGISTERED"
        node = _move(draft, node, state, "STOPPING" if live.stopping else reason)
        _say(draft, node, live.hello)
    if node.observed != live.hello:
        node = dataclasses.replace(node, observed=live.hello)
    node = _joined(node)
    if node is not draft.nodes.get(node_id):
        draft.put(node)


def _with_notice(draft: Draft, node: Node | None) -> Node | None:
    """A node that was taken away as announced, and is there again, is another one of that name."""
    away = node is not None and node.state in (NodeState.GONE, NodeState.LOST)
    if node is None or not away or node.spec.ends_at is None or draft.now < node.spec.ends_at:
        return node
    return dataclasses.replace(node, spec=dataclasses.replace(node.spec, ends_at=None))


def _is_given_back(node: Node) -> bool:
    """A node that is leaving for its provisioner's or the control plane's reasons does not become UP again because its
    agent still reports, and one that was given up does not because its agent comes after all."""
    if node.provided is None or node.provided.fixed:
        return False
    leaving = node.state is NodeState.RELEASING and node.reason not in ("STOPPING", "NOTICE")
    return node.provided.release or leaving or node.state is NodeState.GONE


def _joined(node: Node) -> Node:
    if node.provided is None or (node.provided.joined and node.provided.register_deadline is None):
        return node
    provided = dataclasses.replace(node.provided, joined=True, register_deadline=None)
    return dataclasses.replace(node, provided=provided)


def _say(draft: Draft, node: Node, hello: NodeObserved) -> None:
    action = "node_stopping" if node.state is NodeState.RELEASING else "node_up"
    told = f"{len(hello.gpus)} GPUs at {hello.address or 'an unknown address'}"
    live = draft.live(node.node_id)
    if action == "node_stopping" and live is not None and live.stop_reason:
        told += f"; its agent says {live.stop_reason}"
    _event(draft, node, action, told)


def _check_lease(draft: Draft, node: Node, mass_silence: bool) -> None:
    live = draft.live(node.node_id)
    if node.state in (NodeState.GONE, NodeState.REQUESTED):
        return
    if live is not None and live.goodbye:
        draft.put(_move(draft, node, NodeState.GONE, "GOODBYE"))
        _event(draft, draft.nodes[node.node_id], "node_gone", "its agent said goodbye")
        return
    if node.state not in _HERE:
        return
    end = lease_end(draft, node, mass_silence)
    if draft.now < end:
        if live is None or mass_silence or end <= draft.snapshot.grace_until:
            draft.wake(end)
        else:
            draft.wake_when_silent(node.node_id, draft.timing.lease_s)
        return
    quiet = silence_s(draft, node.node_id)
    told = "nothing heard since this control plane leads" if quiet is None else f"nothing heard for {quiet:.1f} s"
    draft.put(_move(draft, node, NodeState.LOST, "LEASE_EXPIRED"))
    _event(draft, draft.nodes[node.node_id], "node_lost", told)


def _mass_silence(draft: Draft) -> bool:
    here = [node_id for node_id, node in draft.nodes.items() if node.state in _HERE]
    silent = 0
    for node_id in here:
        quiet = silence_s(draft, node_id)
        silent += quiet is None or quiet > draft.timing.suspect_after_s
    return len(here) >= _THIRD_OF_AT_LEAST and silent >= 2 and 3 * silent >= len(here)


def _follow_node(draft: Draft, worker: Worker) -> None:
    node = draft.nodes.get(worker.intent.node_id)
    if node is None or node.state in (NodeState.LOST, NodeState.GONE):
        reason = "NODE_GONE" if node is None or node.state is NodeState.GONE else "LEASE_EXPIRED"
        report = draft.report_of(worker)
        if reason == "NODE_GONE" and report is not None:
            return  # observed first: its last words may say that it ended
        lose(draft, worker, reason)
    elif worker.state is State.ACTIVE:
        _check_health(draft, worker)


def lose(draft: Draft, worker: Worker, reason: str, message: str = "") -> Worker:
    """What becomes of a worker that nobody can see any more: LOST, its slice stays reserved. What was asleep, or was
    to wake, keeps its level: its GPUs may be lent."""
    slept = worker.asleep or worker.intent.waking
    lost = draft.step(
        worker,
        Cause.LOSE,
        reason=reason,
        message=message or f"was {worker.state} on {worker.intent.node_id}",
        sleep_level=worker.intent.sleep_level or 1 if slept else 0,
    )
    draft.worker_event(lost, "worker_lost", "inactive")
    return lost


def _check_health(draft: Draft, worker: Worker) -> None:
    live = draft.live(worker.intent.node_id)
    if live is None:
        return  # unknown: nothing is concluded, the lease runs
    quiet, report = draft.now - live.last_heard_at, draft.report_of(worker)
    probes = report.probe_failures if report is not None and report.incarnation == worker.observed.incarnation else None
    silent = quiet > draft.timing.suspect_after_s
    failing = (probes or 0) >= PROBE_FAILURES_SUSPECT
    if silent:
        draft.wake_when_heard(worker.intent.node_id)
    else:
        draft.wake_when_silent(worker.intent.node_id, draft.timing.suspect_after_s + 1e-3)
    suspect_since = worker.intent.suspect_since
    if (silent or failing) and worker.intent.condition is Condition.HEALTHY:
        reason = "NODE_SILENT" if silent else "PROBES_FAIL"
        suspect = draft.step(worker, Cause.SUSPECT, suspect_since=draft.now, suspect_reason=reason)
        told = f"its node is silent for {quiet:.1f} s" if silent else f"{probes} health probes failed in a row"
        draft.worker_event(suspect, "worker_suspect", "active", reason, told)
    elif not silent and not failing and worker.intent.condition is Condition.SUSPECT and _is_good(worker, probes):
        draft.worker_event(draft.step(worker, Cause.RECOVER), "worker_recovered", "active", "HEARD_AGAIN")
    elif failing and not silent and suspect_since is not None:
        if not worker.failing:
            worker = draft.set_intent(worker, suspect_reason="PROBES_FAIL")
        _give_up_at(draft, worker, suspect_since + draft.timing.unhealthy_after_s)


def _is_good(worker: Worker, probes: int | None) -> bool:
    """What failed its probes is good again when a probe says so; its end says nothing."""
    return probes is not None or not worker.failing


def _give_up_at(draft: Draft, worker: Worker, at: float) -> None:
    """An engine that answers no probe for so long hangs: it is killed and replaced."""
    if draft.now < at:
        draft.wake(at)
        return
    told = f"no probe was answered for {draft.timing.unhealthy_after_s:g} s"
    again = crash_backoff(draft, worker, limited=True)
    dead = draft.step(worker, Cause.FAIL, reason="PROBES_FAILED", message=told, kill=True, **again)
    draft.worker_event(dead, "worker_failed", "inactive")


def _move(draft: Draft, node: Node, state: NodeState, reason: str) -> Node:
    return dataclasses.replace(node, state=state, reason=reason, state_since=draft.now)


def _event(draft: Draft, node: Node, action: str, message: str) -> None:
    draft.events.append(
        Event(
            at=draft.now,
            action=action,
            target=node.node_id,
            status=node.state.value.lower(),
            node_id=node.node_id,
            reason=node.reason,
            message=message,
        )
    )
