"""Every command against a fake control plane and router: what people see, what --json gives, and exit codes."""

import json
import subprocess
import sys

import pytest

from springtide.v1 import types_pb2 as t


def test_status(cli):
    """CM4: one page for people; the same as JSON, unknown values null."""
    shown = cli("status")
    assert shown.exit_code == 0, shown.stderr
    for word in ("revision 42", "demo-1", "node-1", "router-1", "ACTIVE", "3/8"):
        assert word in shown.stdout
    plain = json.loads(cli("status", "--json").stdout)
    assert plain["revision"] == 42
    assert plain["workers"][0]["state"] == "ACTIVE"
    assert plain["workers"][0]["in_flight"] == 3
    assert plain["workers"][0]["kv_use"] is None
    assert plain["pools"][0]["status"]["load_ratio"] is None
    assert plain["pools"][0]["spec"]["policy"]["settings"] == {"scale_up_threshold": 0.8}


def test_watch_goes_on_while_the_control_plane_is_away(cli, stack, monkeypatch):
    """CM8: one page after the other; an error in between is a page too; Ctrl-C ends with 130."""
    pages = []

    async def sleep(_seconds):
        pages.append(1)
        if len(pages) == 1:
            stack.controlplane.away = True
        elif len(pages) == 2:
            stack.controlplane.away = False
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("springtide.cli.invocation.asyncio.sleep", sleep)
    done = cli("workers", "--watch", "--sort", "kv")
    assert done.exit_code == 130
    assert done.stdout.count("demo-1") == 2
    assert "starting again" in done.stdout


def test_status_of_seed_names(cli):
    """CM1, CM2: the seven names and the eight keys."""
    metrics = json.loads(cli("--json", "status", "--metrics").stdout)
    assert list(metrics) == [
        "active_workers",
        "draining_workers",
        "total_workers",
        "active_requests",
        "pending_requests",
        "load_ratio",
        "total_capacity",
    ]
    assert metrics["pending_requests"] is None
    summary = json.loads(cli("status", "--summary", "--json").stdout)
    assert len(summary) == 8
    assert summary["active_instances"] == 1
    assert "active_servers" in cli("status", "--summary").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pools"], ["demo", "1-3"]),
        (["pools", "demo"], ["load_ratio scale_up_threshold=0.8", "tensor-parallel size 2"]),
        (["workers"], ["demo-1", "0,1", "127.0.0.1:41000"]),
        (["workers", "--sort", "in-flight", "--pool", "demo"], ["demo-1"]),
        (["workers", "demo-1"], ["node-1 GPUs 0,1", "ACTIVE"]),
        (["nodes"], ["node-1", "UP"]),
        (["models"], ["demo", "sim"]),
        (["decisions"], ["SCALE_UP", "1->2", "LOAD_ABOVE_THRESHOLD"]),
        (["events"], ["scale_up_start", "demo-2"]),
        (["health"], ["control plane", "router", "pool demo", "SERVING"]),
        (["version"], ["springtide 0."]),
        (["scale", "demo", "2"], ["pinned at 2"]),
        (["scale", "demo", "auto"], ["follows its policy"]),
        (["pause", "demo", "--for", "10m", "--reason", "validation"], ["10m00s"]),
        (["resume", "demo"], ["scaled again"]),
        (["drain", "demo-1"], ["DRAINING/FINISHING"]),
        (["activate", "demo-1"], ["STARTING/REQUESTED"]),
        (["cancel", "demo-1"], ["demo-1"]),
        (["cordon", "node-1", "--reason", "repair"], ["node-1 takes no new workers"]),
        (["uncordon", "node-1"], ["takes new workers"]),
        (["sleep", "demo-1"], ["demo-1"]),
        (["wake", "demo-1"], ["demo-1"]),
        (["lend", "demo-1", "--to", "a trainer"], ["node-1"]),
        (["reclaim", "demo-1"], ["demo-1"]),
        (["engine", "demo-1", "load"], ["3"]),
        (["worker-verb", "demo-1", "load"], ["3"]),
        (["weights", "demo", "--version", "7", "--source", "/m/7"], ["7"]),
        (["notice", "node-1", "--in", "120s"], ["node-1"]),
        (["token", "create", "--provisioner", "hpc"], ["stj1.made"]),
        (["delete", "demo", "--drain"], ["being deleted"]),
        (["generate", "hello", "--pool", "demo"], ["Paris"]),
        (["test"], ["demo", "ms"]),
    ],
)
def test_each_command_for_people_and_programs(cli, arguments, words):
    """CM4: each command answers, and each gives JSON."""
    shown = cli(*arguments)
    assert shown.exit_code == 0, shown.stderr
    for word in words:
        assert word in shown.stdout
    as_json = cli(*arguments, "--json")
    assert as_json.exit_code == 0, as_json.stderr
    json.loads(as_json.stdout)


def test_requests_carry_what_was_said(cli, stack):
    """CP5, CP6: flags arrive as fields."""
    cli("pause", "demo", "--for", "1h30m", "--reason", "validation")
    assert (stack.controlplane.asked[-1].hold.seconds, stack.controlplane.asked[-1].reason) == (5400, "validation")
    cli("weights", "demo", "--version", "7", "--source", "/m/7", "--barrier")
    weights = stack.controlplane.asked[-1]
    assert (weights.pool, weights.version, weights.source, weights.barrier) == ("demo", "7", "/m/7", True)
    cli("notice", "node-1", "--in", "2m")
    assert (stack.controlplane.asked[-1].node_id, stack.controlplane.asked[-1].until_gone.seconds) == ("node-1", 120)
    cli("token", "create", "--provisioner", "hpc", "--for", "2h")
    assert (stack.controlplane.asked[-1].provisioner_id, stack.controlplane.asked[-1].valid_for.seconds) == (
        "hpc",
        7200,
    )
    cli("drain", "demo-1", "--finish-within", "2.5s", "--reason", "upgrade")
    assert (stack.controlplane.asked[-1].timeout.seconds, stack.controlplane.asked[-1].timeout.nanos) == (
        2,
        500_000_000,
    )
    cli("scale", "demo", "auto")
    assert stack.controlplane.asked[-1].automatic
    assert not stack.controlplane.asked[-1].HasField("workers")
    cli("decisions", "--pool", "demo", "--limit", "3", "--skip-holds")
    assert (stack.controlplane.asked[-1].limit, stack.controlplane.asked[-1].skip_holds) == (3, True)
    cli("generate", "-", "--completion", "--pool", "demo", "--temperature", "0", "--stop", "x", stdin="from a pipe")
    asked = stack.router.asked[-1]
    assert (asked.prompt, asked.sampling.temperature, list(asked.sampling.stop)) == ("from a pipe", 0.0, ["x"])
    assert asked.sampling.HasField("temperature")
    assert not asked.sampling.HasField("seed")
    cli("generate", "hi", "--system", "be brief")
    assert [(m.role, m.content) for m in stack.router.asked[-1].chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_events_as_csv(cli):
    """CM6: the fourth seed's columns and action names."""
    lines = cli("events", "--format", "csv").stdout.splitlines()
    assert lines == [
        "time,action,target,status",
        "1700000000.500,scale_up_start,demo-2,scaling_up",
        "1700000000.500,scale_up_complete,demo-2,active",
    ]


def test_events_follow_resumes_after_the_last_one(cli, stack):
    lines = cli("events", "--format", "csv", "--follow").stdout.splitlines()
    assert stack.controlplane.asked[-1].after_event_id == 2
    assert lines[-1] == "1700000000.500,scale_down_start,demo-2,draining"
    objects = [json.loads(line) for line in cli("events", "--json", "--follow").stdout.splitlines()]
    assert [o["event_id"] for o in objects] == [1, 2, 3]


def test_wait_for_scale(cli):
    done = cli("scale", "demo", "3", "--wait")
    assert done.exit_code == 0
    assert "3 active" in done.stderr
    assert "3 active" in done.stdout


def test_wait_times_out_with_6(cli, stack):
    stack.controlplane.frozen = True
    done = cli("scale", "demo", "3", "--wait", "--timeout", "0s")
    assert done.exit_code == 6
    assert "WAIT_TIMED_OUT" in done.stderr


def test_wait_for_drain_and_activate(cli):
    done = cli("drain", "demo-1", "--wait")
    assert done.exit_code == 0
    assert "INACTIVE/STOPPED" in done.stdout
    done = cli("activate", "demo-1", "--wait")
    assert done.exit_code == 0
    assert "ACTIVE" in done.stdout


def test_wait_ends_when_no_start_attempt_is_left(cli, stack):
    """CP14: a start that failed its last time is not waited for until the bound."""
    worker = stack.controlplane.workers["demo-1"]
    stack.controlplane.pools["demo"].spec.max_start_attempts = 5
    worker.attempts = 5

    def fail(_worker, _state, _phase=0):
        stack.controlplane.pending.append((2, lambda: setattr(worker, "phase", t.WORKER_PHASE_FAILED)))

    stack.controlplane._becomes = fail
    done = cli("activate", "demo-1", "--wait")
    assert done.exit_code == 1
    assert "START_ATTEMPTS_EXHAUSTED" in done.stderr
    assert "springtide workers demo-1" in done.stderr


def test_wait_notices_that_somebody_changed_course(cli, stack):
    """A drain that is cancelled meanwhile is not waited for until the bound."""
    worker = stack.controlplane.workers["demo-1"]
    stack.controlplane._becomes = lambda w, state, phase=0: setattr(worker, "state", t.WORKER_STATE_ACTIVE)
    done = cli("drain", "demo-1", "--wait")
    assert done.exit_code == 1
    assert "WAIT_OVERTAKEN" in done.stderr


def test_delete_waits_until_it_is_gone(cli):
    done = cli("delete", "demo", "--drain", "--wait")
    assert done.exit_code == 0
    assert cli("pools", "demo").exit_code == 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pools", "nosuch"], 4, ["nosuch", "Known: demo"]),
        (["workers", "nosuch"], 4, ["worker", "demo-1"]),
        (["cordon", "nosuch"], 4, ["node", "node-1"]),
        (["generate", "hi", "--pool", "nosuch"], 4, ["nosuch", "Known: demo"]),
        (["undrain", "demo-1"], 5, ["TOO_LATE", "Activate it"]),
        (["delete", "demo"], 5, ["POOL_HAS_WORKERS", "--drain"]),
        (["scale", "demo", "many"], 2, ["many", "auto"]),
        (["scale", "demo"], 2, ["N|auto"]),
        (["scale", "demo", "auto", "--wait"], 2, ["--wait needs a number"]),
        (["pause", "demo", "--for", "soon"], 2, ["soon", "10m"]),
        (["pools", "--address", "nowhere"], 2, ["nowhere", "127.0.0.1:7400"]),
        (["scael", "demo"], 2, ["Did you mean scale?"]),
        (["workers", "--sort", "colour"], 2, ["in-flight"]),
    ],
)
def test_bad_input(cli, arguments, code, words):
    """Each error names field, value and remedy and has its exit code."""
    done = cli(*arguments)
    assert done.exit_code == code, done.output
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.output


def test_error_as_json(cli):
    done = cli("pools", "nosuch", "--json")
    error = json.loads(done.stderr)["error"]
    assert (error["reason"], error["exit_code"], error["field"], error["value"]) == (
        "POOL_NOT_FOUND",
        4,
        "pool",
        "nosuch",
    )
    assert "demo" in error["remedy"]


def test_nobody_answers(cli, stack):
    """NA14: no control plane, no router."""
    nobody = {"SPRINGTIDE_ADDRESS": "127.0.0.1:9", "SPRINGTIDE_ROUTER": "127.0.0.1:9"}
    done = cli("status", env=nobody)
    assert done.exit_code == 3
    assert "127.0.0.1:9" in done.stderr
    assert "springtide up" in done.stderr
    assert cli("generate", "hi", "--pool", "demo", env=nobody).exit_code == 3
    # CM5: a flag wins over the environment
    assert cli("--address", stack.addresses[0], "status", env=nobody).exit_code == 0
    assert cli("status", "--address", stack.addresses[0], env=nobody).exit_code == 0


def test_health_says_who_does_not_serve(cli, stack):
    stack.run(stack.set_health(1, 2))
    stack.controlplane.pools["demo"].status.active = 0
    done = cli("health", "--json")
    assert done.exit_code == 1
    assert [row["health"] for row in json.loads(done.stdout)] == ["SERVING", "NOT_SERVING", "NOT_SERVING"]


def test_generate_asks_for_the_pool_when_there_are_several(cli, stack):
    stack.router.models.append(type(stack.router.models[0])(name="other", pool="other"))
    done = cli("generate", "hi")
    assert done.exit_code == 1
    assert "demo, other" in done.stderr


def test_load_test_counts_failures(cli, stack):
    """SM7: 100 requests at concurrency 32; a failure is counted by its reason and ends with 1."""
    done = cli("test", "--requests", "100", "--concurrency", "32", "--json")
    assert done.exit_code == 0
    (result,) = json.loads(done.stdout)
    assert (result["requests"], result["failed"], result["tokens"]) == (100, 0, 200)
    stack.router.asked.clear()
    stack.router.fail_every = 5
    done = cli("test", "--requests", "10", "--concurrency", "2")
    assert done.exit_code == 1
    assert "2 x QUEUE_FULL" in done.stdout
    stack.router.fail_every, stack.router.cut = 0, True
    done = cli("test")
    assert done.exit_code == 1
    assert "NOT_FINISHED" in done.stdout


@pytest.mark.parametrize("process", ["controlplane", "nodeagent", "router"])
def test_starters_become_the_module(monkeypatch, cli, process):
    called: dict[str, list[str]] = {}
    monkeypatch.setattr("os.execv", lambda path, command: called.update(command=command))
    assert cli(process, "--config", "x.toml", "--help").exit_code == 0
    assert called["command"][-5:] == ["-m", process, "--config", "x.toml", "--help"]


def test_start_up_loads_nothing_heavy():
    """`springtide --help` imports neither gRPC nor the OpenTelemetry SDK nor rich."""
    program = (
        "import sys; from springtide.cli.root import springtide\n"
        "try: springtide(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('grpc', 'google.protobuf', 'opentelemetry', 'rich', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
