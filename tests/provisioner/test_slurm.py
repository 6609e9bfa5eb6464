"""A real SLURM of four virtual nodes, the real processes, and a load that notices nothing of what happens to nodes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from springtide.v1 import types_pb2 as t
from tests.provisioner.slurm_cluster import VirtualCluster, running_cluster
from tests.provisioner.slurm_stack import Load, SlurmStack
from tests.system.conftest import ENGINE, TIMING
from tests.system.stack import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GPUS = 2
NODES_WANTED = 3
PROVIDER = {
    "partition": "lowcancel",
    "gpus_per_node": GPUS,
    "simulated_gpus": True,
    "max_nodes": NODES_WANTED + 1,
    "time_limit": "60",
    "notice_s": 20,
    "preempt_grace_s": 6,
    "poll_interval_s": 0.2,
}
NODES = "idle_s = 2.0\nlost_release_s = 5.0\nbackoff_s = 0.5\nregister_timeout_s = 30.0\nrollover_lead_s = 150.0\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    """One for all tests here."""
    with running_cluster() as found:
        yield found


@pytest.fixture
def stack(cluster: VirtualCluster, tmp_path: Path) -> Iterator[SlurmStack]:
    """Stopped with its jobs at the end; neither cluster nor host has anything of it left."""
    (tmp_path / "provisioner" / "provider").mkdir(parents=True)
    (tmp_path / "provisioner" / "provider" / "target").write_text(str(NODES_WANTED))
    found = SlurmStack(tmp_path, cluster, provider=PROVIDER, nodes=NODES, timing=TIMING)
    try:
        yield found
        found.cancel_jobs()
    finally:
        for job in found.jobs():
            cluster.run("scancel", "--signal=KILL", "--full", job, check=False)
        found.stop()
    wait_for("the end of all jobs", lambda: not found.jobs())
    assert found.strays() == []


def whole(stack: SlurmStack) -> dict[str, str] | None:
    """Node name by job id, once every wanted worker is ACTIVE on exactly the wanted jobs."""
    running, live = stack.jobs("R"), stack.jobs()
    up = {node.reference for node in stack.nodes_up()}
    active = stack.workers("ACTIVE")
    good = len(running) == NODES_WANTED and running.keys() == live.keys() == up
    return running if good and len(active) == NODES_WANTED * GPUS else None


def wait_whole(stack: SlurmStack, what: str, timeout_s: float = 45.0) -> dict[str, str]:
    try:
        return wait_for(f"the whole pool {what}", lambda: whole(stack), timeout_s, every_s=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{stack.explain()}") from None


def explained(stack: SlurmStack, what: str, probe: Callable[[], bool]) -> None:
    """`wait_for`, with all that happened when it does not come."""
    try:
        wait_for(what, probe, 120, every_s=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{stack.explain()}") from None


def serve(stack: SlurmStack) -> None:
    """The pool `demo`, of as many workers as the wanted nodes have room for."""
    stack.start()
    stack.apply(
        name="demo",
        engine="sim",
        min_workers=0,
        max_workers=NODES_WANTED * GPUS,
        initial_workers=NODES_WANTED * GPUS,
        engine_args=ENGINE,
        policy_name="static",
        policy={"workers": NODES_WANTED * GPUS},
    )


def test_a_pool_on_slurm(cluster: VirtualCluster, stack: SlurmStack) -> None:
    """PV4, CP9, CP10, CP12, NA10: acquired to the target; a preemption, a dead host, a time limit and restarts of
    provisioner and control plane under load: the pool comes back each time, no job is orphaned or one too many, and no
    client sees anything."""
    serve(stack)
    before = wait_whole(stack, "at first")
    stack.wait_routable("demo")
    load = Load(stack.http, "demo")
    try:
        wait_for("some answers", lambda: len(load.results) > 5)

        victim, host = next(iter(before.items()))
        high = cluster.sbatch("--exclusive", "-p", "high", "-w", host)
        wait_for("the preemption", lambda: cluster.jobs().get(high) == "RUNNING")
        after = wait_whole(stack, "after a preemption")
        assert victim not in after
        assert "PREEMPTED" in stack.told(victim)
        explained(stack, "the preemption's event", lambda: len(preemptions_of(stack, victim)) == 1)
        assert stack.counted("controlplane", "springtide_events_total", action="node_preempted") == 1
        cluster.run("scancel", high)

        dead, host = next(iter(after.items()))
        cluster.kill_node(int(host.removeprefix("vnode")))
        wait_for("the end of its job", lambda: dead not in stack.jobs())
        assert "NODE_FAIL" in stack.told(dead)
        before = wait_whole(stack, "after a host died")
        assert dead not in before
        cluster.start_node(int(host.removeprefix("vnode")))
        wait_for("the host's return", lambda: host in cluster.idle_nodes())

        stack.kill("provisioner")
        stack.kill("controlplane")
        stack.start("provisioner")
        stack.start("controlplane")
        assert wait_whole(stack, "after restarts") == before, "no job is lost, none is asked for twice"

        old = min(before, key=int)  # a node that lives for less than twice the lead serves for half of its time
        cluster.run("scontrol", "update", f"JobId={old}", "TimeLimit=3")
        explained(stack, "the end at the time limit", lambda: old not in stack.jobs())
        wait_whole(stack, "after a time limit")
        assert replaced_first(stack, old), stack.explain()
    finally:
        report = load.stop()
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    assert len(preemptions_of(stack, victim)) == 1, "told once, by the agent's notice or by squeue, whichever was first"
    assert stack.most_jobs <= NODES_WANTED + 1, "one more while one is replaced"
    ours = [job for job in cluster.jobs("all") if job != high]
    assert len(ours) == NODES_WANTED + 3, f"one job for each that was lost: {cluster.jobs('all')}"


def test_a_daemon_dies_and_its_job_does_not(cluster: VirtualCluster, stack: SlurmStack) -> None:
    """PV4, CP12: kill -9 of a slurmd alone: SLURM gives its job up (NODE_FAIL) while the agent goes on. Its workers
    drain, others take their place, nothing is cut; when slurmd comes back it ends what is left."""
    serve(stack)
    before = wait_whole(stack, "at first")
    stack.wait_routable("demo")
    load = Load(stack.http, "demo")
    given_up, host = next(iter(before.items()))
    try:
        wait_for("some answers", lambda: len(load.results) > 5)
        cluster.kill_node(int(host.removeprefix("vnode")), with_jobs=False)
        wait_for("NODE_FAIL", lambda: "NODE_FAIL" in stack.told(given_up), 60, every_s=0.5)
        wait_for("other workers", lambda: len(off(stack, given_up)) == NODES_WANTED * GPUS, 60, every_s=0.2)
    finally:
        report = load.stop()
        if host not in cluster.idle_nodes():
            cluster.start_node(int(host.removeprefix("vnode")))
    wait_for("the host's return", lambda: host in cluster.idle_nodes(), every_s=0.2)
    wait_for("the end of what was left", lambda: not left_of(cluster, given_up))
    assert not report.failed, report.explain()
    assert not report.inexact, report.explain()
    wait_whole(stack, "in the end")


def off(stack: SlurmStack, job: str) -> list[t.Worker]:
    """ACTIVE workers that are not on this job's node."""
    ids = {node.node_id for node in stack.status().nodes if node.reference == job}
    return [worker for worker in stack.workers("ACTIVE") if worker.node_id not in ids]


def preemptions_of(stack: SlurmStack, job: str) -> list[t.Event]:
    ids = {node.node_id for node in stack.status().nodes if node.reference == job}
    return [event for event in stack.events() if event.action == "node_preempted" and event.target in ids]


def left_of(cluster: VirtualCluster, job: str) -> list[int]:
    return [pid for pid, env in cluster.processes() if env.get("SLURM_JOB_ID") == job]


def replaced_first(stack: SlurmStack, job: str) -> bool:
    """The workers of a job whose end was near were ACTIVE elsewhere before it ended."""
    (node_id,) = (node.node_id for node in stack.status().nodes if node.reference == job)
    events = stack.events()
    said = [n for n, event in enumerate(events) if event.target == node_id and event.reason == "ENDS_SOON"]
    gone = [n for n, event in enumerate(events) if event.target == node_id and event.action == "node_gone"]
    ready = [event for event in events[said[0] : gone[0]] if event.action == "scale_up_complete"]
    return len(ready) == GPUS
