"""vLLM and SGLang on real GPUs, through the whole system: start, serve, scale, sleep, wake, kill, stop.

NA4 NA7 NA8 NA11 RT1 RT2 RT6 RT8 F1 F30 F34. The steps of one engine build on one another and run in this order; a
failed step does not keep the next ones from being tried. What each one found is in the report (see conftest.py).
"""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest

from springtide.v1 import controlplane_pb2 as cp
from springtide.v1 import types_pb2 as t
from tests.gpu.clients import Load, open_streams, stream_grpc, stream_http
from tests.gpu.rig import Rig
from tests.system.stack import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def test_one_worker_starts(rig: Rig) -> None:
    """Start to ACTIVE, its phases, and the memory that it takes."""
    began = time.monotonic()
    rig.apply()
    (worker,) = rig.active(1)
    rig.facts["start_to_active_s"] = round(time.monotonic() - began, 2)
    rig.facts["phases_s"] = rig.start_spans(worker)
    rig.facts["held_mib"] = rig.held_mib()
    rig.stack.wait_routable(rig.pool)
    if rig.devices.there:
        held = rig.held_mib() or []
        assert held[int(worker.gpu_ids[0])] > 1024
        assert all(mib < 1024 for at, mib in enumerate(held) if at != int(worker.gpu_ids[0]))


def test_streams_over_http_and_grpc(rig: Rig) -> None:
    """Whole streams over both fronts."""
    answer = stream_http(rig.stack.http, rig.pool, rig.kit.tokens)
    rig.facts |= {"http_tokens": answer.tokens, "http_s": round(answer.took_s, 2), "first_token_s": answer.first_s}
    assert answer.ok, answer
    assert (answer.tokens, answer.finish) == (rig.kit.tokens, "length")
    kinds, tokens = stream_grpc(f"127.0.0.1:{rig.stack.router_port}", rig.pool, rig.kit.tokens)
    rig.facts["grpc_tokens"] = tokens
    assert kinds[0] == "started"
    assert (kinds.count("finished"), kinds[-1]) == (1, "finished")
    assert tokens == rig.kit.tokens


def test_a_client_that_leaves_frees_the_engine(rig: Rig) -> None:
    """RT8: eight streams, all hung up; the engine itself says that nothing runs."""
    (worker,) = rig.active(1)
    sockets = open_streams(rig.stack.http, rig.pool, 8, 10 * rig.kit.tokens)
    wait_for("eight requests in the engine", lambda: _running(rig, worker.worker_id) == 8, 20)
    for sock in sockets:
        sock.close()
    began = time.monotonic()
    wait_for("nothing in the engine", lambda: _running(rig, worker.worker_id) == 0, 30, every_s=0.02)
    rig.facts["aborted_after_s"] = round(time.monotonic() - began, 2)
    wait_for("nothing in the shim", lambda: [w.in_flight for w in rig.stack.workers("ACTIVE")] == [0], 10)


def _running(rig: Rig, worker_id: str) -> int | None:
    """By the engine's own word. SGLang's metric keeps its last value when it becomes idle; its loads do not."""
    if rig.kit.engine == "sglang":
        loads = json.loads(asyncio.run(rig.engine_get(worker_id, "/v1/loads?include=core")))
        return sum(int(load["num_running_reqs"]) for load in loads["loads"])
    text = asyncio.run(rig.engine_get(worker_id, "/metrics"))
    values = [
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
    ]
    return int(sum(values)) if values else None


def test_one_two_one_under_load(rig: Rig) -> None:
    """NA7: disjoint GPUs, not one failed request, and the memory of the second one free again."""
    _one_two_one(rig, 1)


def _one_two_one(rig: Rig, gpus_each: int) -> None:
    (first,) = rig.active(1)
    with Load(rig.stack.http, rig.pool, rig.kit.tokens) as load:
        began = time.monotonic()
        rig.scale(2)
        workers = rig.active(2)
        rig.facts["one_to_two_s"] = round(time.monotonic() - began, 2)
        rig.facts["second_phases_s"] = [rig.start_spans(w) for w in workers if w.worker_id != first.worker_id]
        rig.facts["gpus"] = [list(w.gpu_ids) for w in workers]
        rig.facts["held_mib_by_two"] = rig.held_mib()
        wait_for("load on both", lambda: all(w.in_flight > 0 for w in rig.stack.workers("ACTIVE")), 60)
        began = time.monotonic()
        rig.scale(1)
        (left,) = rig.active(1)
        rig.stack.wait_workers("DRAINING", 0, 90)
        rig.facts["two_to_one_s"] = round(time.monotonic() - began, 2)
    rig.facts |= load.facts
    held = [gpu for worker in workers for gpu in worker.gpu_ids]
    assert len(held) == len(set(held)) == 2 * gpus_each
    assert not load.failed, load.failed[:3]
    gone = [int(gpu) for w in workers if w.worker_id != left.worker_id for gpu in w.gpu_ids if gpu.isdigit()]
    rig.facts["memory_free_after_s"] = rig.wait_free(gone)
    rig.facts["held_mib_by_one"] = rig.held_mib()


def test_asleep_and_awake(rig: Rig) -> None:
    """Scale-down by sleeping: the process stays, its memory is free on the card; waking is not a start."""
    (worker,) = rig.active(1)
    before = rig.held_mib()
    rig.apply(scale_down=t.SCALE_DOWN_SLEEP, min_workers=0)
    try:
        began = time.monotonic()
        rig.scale(0)
        wait_for("a sleeping worker", lambda: rig.in_phase(t.WORKER_PHASE_SLEEPING), 60)
        rig.facts["asleep_after_s"] = round(time.monotonic() - began, 2)
        (sleeper,) = rig.in_phase(t.WORKER_PHASE_SLEEPING)
        asleep = rig.held_mib()
        rig.facts |= {"held_mib_before": before, "held_mib_asleep": asleep, "freed_bytes": sleeper.freed_bytes}
        began = time.monotonic()
        rig.scale(1)
        (awake,) = rig.active(1)
        rig.facts["awake_after_s"] = round(time.monotonic() - began, 2)
        rig.facts |= {"held_mib_awake": rig.held_mib(), "reoccupied_bytes": awake.reoccupied_bytes}
        assert (awake.worker_id, awake.incarnation) == (worker.worker_id, worker.incarnation)
        rig.stack.wait_routable(rig.pool)
        answer = stream_http(rig.stack.http, rig.pool, rig.kit.tokens)
        assert answer.ok, answer
        if before is not None and asleep is not None:
            gpu = int(worker.gpu_ids[0])
            assert asleep[gpu] < before[gpu] - 2048
    finally:
        rig.apply()
        rig.scale(1)


def test_weights_change_in_place(rig: Rig) -> None:
    """A new weight version: the same engine serves other answers, and it is ACTIVE with that version only."""
    (worker,) = rig.active(1)
    rig.stack.wait_routable(rig.pool)
    before = stream_http(rig.stack.http, rig.pool, 30)
    source = rig.make_model("second", seed=2)
    began = time.monotonic()
    try:
        rig.stack.operator.SetWeights(cp.SetWeightsRequest(pool=rig.pool, version="second", source=source), timeout=5)

        def current() -> bool:
            found = rig.stack.workers("ACTIVE")
            return [(w.weight_version, w.admission) for w in found] == [("second", t.WORKER_ADMISSION_OPEN)]

        wait_for("the new version", current, 60)
        rig.facts["updated_after_s"] = round(time.monotonic() - began, 2)
        rig.stack.wait_routable(rig.pool)
        after = stream_http(rig.stack.http, rig.pool, 30, timeout_s=60)
        rig.facts |= {"text_before": before.text[:60], "text_after": after.text[:60]}
        assert before.ok, before
        assert after.ok, after
        assert [w.incarnation for w in rig.stack.workers("ACTIVE")] == [worker.incarnation], "the same engine"
        assert rig.kit.engine == "sim" or before.text != after.text
    except AssertionError:
        rig.renew("proof-again")  # so that the next steps have a worker
        raise


def test_a_killed_api_process_is_replaced_whole(rig: Rig) -> None:
    """NA8 NA11 F30: SIGKILL of the engine's first process, under load: no orphan, memory free, a new incarnation."""
    (worker,) = rig.active(1)
    tree = rig.tree(worker.worker_id)
    rig.facts["processes"] = len(tree)
    with Load(rig.stack.http, rig.pool, rig.kit.tokens, streams=4) as load:
        wait_for("load", lambda: any(w.in_flight for w in rig.stack.workers("ACTIVE")), 30)
        _kill_and_replace(rig, worker, tree[0], tree)
    rig.facts |= load.facts
    answer = stream_http(rig.stack.http, rig.pool, 20)
    assert answer.ok, answer


def _kill_and_replace(rig: Rig, worker: t.Worker, victim: psutil.Process, tree: list[psutil.Process]) -> None:
    rig.facts["killed"] = " ".join(victim.cmdline()).strip()[:100]
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=60)
    rig.facts["all_processes_gone_s"] = round(time.monotonic() - began, 2)
    assert not alive, alive

    def replaced() -> bool:
        return any(w.incarnation > worker.incarnation for w in rig.stack.workers("ACTIVE"))

    wait_for("a new incarnation", replaced, rig.kit.start_s)
    rig.facts["replaced_s"] = round(time.monotonic() - began, 2)
    # A new engine starts only when the memory of the old one was free: what is held is one engine's.
    rig.facts["held_mib"] = rig.held_mib()
    events = [e for e in rig.stack.events() if e.action == "worker_failed" and e.target == worker.worker_id]
    rig.facts["reason"] = events[-1].reason if events else None
    assert events, "the failure is not among the events"
    version = rig.stack.operator.GetPool(cp.GetPoolRequest(name=rig.pool), timeout=5).pool.status.weight_version
    assert [w.weight_version for w in rig.stack.workers("ACTIVE")] == [version]


def test_one_worker_on_two_gpus(rig: Rig) -> None:
    """TP=2: the first pool goes, its memory is free, and one worker takes both GPUs."""
    began = time.monotonic()
    rig.renew("proof-wide", tensor_parallel_size=2)
    (worker,) = rig.active(1)
    rig.facts["from_one_pool_to_the_other_s"] = round(time.monotonic() - began, 2)
    rig.facts["phases_s"] = rig.start_spans(worker)
    rig.facts["gpus"] = list(worker.gpu_ids)
    rig.facts["held_mib"] = rig.held_mib()
    rig.stack.wait_routable(rig.pool)
    assert len(worker.gpu_ids) == 2
    answer = stream_http(rig.stack.http, rig.pool, rig.kit.tokens)
    assert answer.ok, answer
    assert answer.tokens == rig.kit.tokens


def test_one_two_one_of_two_gpus_each_under_load(rig: Rig) -> None:
    """On a host with four GPUs: two workers of two GPUs each, disjoint, and none of their requests fails."""
    if rig.gpus < 4:
        rig.facts["not_tried"] = f"this host has {rig.gpus} GPUs"
        return
    _one_two_one(rig, 2)


def test_a_killed_rank_is_replaced_whole(rig: Rig) -> None:
    """NA8 NA11 F34: SIGKILL of one tensor-parallel rank ends the whole worker; a new one takes its place."""
    (worker,) = rig.active(1)
    tree = rig.tree(worker.worker_id)
    _kill_and_replace(rig, worker, rig.rank_of(worker.worker_id, int(worker.gpu_ids[-1].removeprefix("sim"))), tree)
    answer = stream_http(rig.stack.http, rig.pool, 20)
    assert answer.ok, answer


def test_nothing_is_left(rig: Rig) -> None:
    """NA8: after the agent's stop no process of an engine lives and all memory is free."""
    began = time.monotonic()
    rig.stop()
    rig.facts["stopped_s"] = round(time.monotonic() - began, 2)
    assert rig.stack.strays() == []
    rig.facts["memory_free_after_s"] = rig.wait_free(list(range(rig.gpus)))
    rig.facts["held_mib"] = rig.held_mib()
