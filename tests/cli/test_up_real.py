"""`springtide up` for real, with the sim engine, on ports that the kernel chooses."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from springtide.cli.root import springtide
from springtide.cli.up import leftovers
from springtide.client import Springtide
from springtide.errors import SpringtideError

START_S = 45
STOP_S = 45


class Up:
    """One `springtide up` in a session of its own."""

    def __init__(self, data_dir, *arguments):
        self.data_dir = Path(data_dir)
        self.output = self.data_dir.with_suffix(f".{time.monotonic_ns()}.out")
        ports = ("--controlplane-port", "0", "--router-port", "0", "--http-port", "0")
        command = [sys.executable, "-m", "springtide.cli", "up", "--engine", "sim", "--data-dir", str(data_dir)]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "SPRINGTIDE_ADDRESS": "127.0.0.1:9"}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                [*command, *ports, *arguments], stdout=out, stderr=out, start_new_session=True, env=environ
            )

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, words, timeout_s=START_S):
        poll(lambda: words in self.text or self.process.poll() is not None, timeout_s, lambda: self.text)
        assert words in self.text, self.text
        return self

    def discovery(self, process):
        return json.loads((self.data_dir / process / f"{process}.json").read_text())

    def client(self):
        return Springtide(self.discovery("controlplane")["grpc"], self.discovery("router")["grpc"])

    def ours(self):
        """Pids of everything that belongs to this stack, the supervisor left out."""
        marks = leftovers.markers(self.data_dir / "nodeagent")
        found = {pid for pid, _ in leftovers.left(marks)}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (self.process.pid, os.getpid()):
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self.data_dir).encode() in command:
                    found.add(int(entry.name))
        return found

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def poll(condition, timeout_s, told=lambda: ""):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


@pytest.fixture
def up(tmp_path):
    """Starts stacks; whatever a test leaves is killed."""
    running = []

    def start(*arguments, name="data"):
        running.append(Up(tmp_path / name, *arguments))
        return running[-1]

    yield start
    for stack in running:
        stack.process.kill()
        stack.process.wait(10)
        for pid in stack.ours():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


SERVES = "Springtide serves pool demo"


def test_up_serves_and_ctrl_c_leaves_nothing(up):
    """One command gives a stack that answers; Ctrl-C ends it with no process left; the same folder continues."""
    stack = up("--metrics").wait_for(SERVES)
    assert "curl http://127.0.0.1:" in stack.text
    with stack.client() as client:
        assert len(client.text("demo", "hello", max_tokens=5).split()) == 5
        assert client.health() == client.health(router=True) == "SERVING"
        first = client.status()
    assert len(stack.ours()) >= 5  # three processes, a shim, its engine
    assert stack.end(signal.SIGINT) == 0
    assert "Stopped; no process is left." in stack.text
    assert stack.ours() == set()

    again = up().wait_for(SERVES)
    with again.client() as client:
        status = client.status()
        assert status.store_id == first.store_id
        assert [pool.spec.name for pool in status.pools] == ["demo"]
        assert [e.action for e in client.events()].count("pool_created") == 1
    assert again.end(signal.SIGTERM) == 0
    assert again.ours() == set()


@pytest.mark.slow
def test_two_stacks_side_by_side_and_a_shared_folder(up):
    """Another folder is another stack; the same folder is refused with the process that holds it."""
    one = up(name="one").wait_for(SERVES)
    two = up("--pool", "other", name="two").wait_for("Springtide serves pool other")
    rival = up(name="one")
    assert rival.process.wait(START_S) == 2
    assert str(one.process.pid) in rival.text
    assert "--data-dir" in rival.text
    with one.client() as first, two.client() as second:
        assert [m.name for m in first.models()] == ["demo"]
        assert [m.name for m in second.models()] == ["other"]
    assert one.end() == 0
    with two.client() as second:
        assert second.text("other", "still here", max_tokens=2)
    assert two.end(signal.SIGHUP) == 0  # the terminal hung up
    assert one.ours() == two.ours() == set()


def test_a_port_in_use_starts_nothing(up, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        stack = up("--http-port", port)
        assert stack.process.wait(START_S) == 2
    for word in ("--http-port", port, "in use", str(os.getpid())):
        assert word in stack.text
    assert stack.ours() == set()


@pytest.mark.slow
@pytest.mark.parametrize("process", ["controlplane", "router", "nodeagent"])
def test_a_killed_process_comes_back_on_its_ports(up, process):
    """Each process is started again when it dies, where the others find it; engines are not."""
    stack = up().wait_for(SERVES)
    before = stack.discovery(process)
    with stack.client() as client:
        (worker,) = client.workers()
        os.kill(before["pid"], signal.SIGKILL)
        stack.wait_for("is back")
        after = stack.discovery(process)
        assert after["pid"] != before["pid"]
        assert after.get("grpc") == before.get("grpc")
        poll(lambda: client.health() == client.health(router=True) == "SERVING", 30)
        poll(lambda: any(m.active_workers for m in client.models()), 30)
        assert len(client.text("demo", "again", max_tokens=3).split()) == 3
        assert [w.incarnation for w in client.workers()] == [worker.incarnation]
    assert stack.end() == 0
    assert stack.ours() == set()


@pytest.mark.slow
def test_a_session_of_an_operator(up):
    """CM4: the commands of the tour against real processes, with their exit codes and what they leave behind."""
    stack = up("--policy", "static").wait_for(SERVES)
    environ = {
        "SPRINGTIDE_ADDRESS": stack.discovery("controlplane")["grpc"],
        "SPRINGTIDE_ROUTER": stack.discovery("router")["grpc"],
    }

    def run(code, *arguments, stdin=None):
        done = CliRunner().invoke(springtide, list(arguments), env=environ, input=stdin)
        assert done.exit_code == code, f"{arguments}: {done.output}"
        return done.output

    assert "3 active" in run(0, "scale", "demo", "3", "--wait")
    assert "1 to 3" in run(1, "scale", "demo", "9")
    run(0, "scale", "demo", "2", "--wait")
    run(0, "drain", "demo-2", "--wait", "--reason", "test")
    run(0, "activate", "demo-2", "--wait")
    run(5, "undrain", "demo-1")
    run(5, "cancel", "demo-1")
    run(0, "scale", "demo", "1", "--wait")
    node = json.loads(run(0, "nodes", "--json"))[0]["node_id"]
    run(0, "cordon", node, "--reason", "repair")
    assert "cordoned: repair" in run(0, "nodes")
    run(0, "uncordon", node)
    run(0, "pause", "demo", "--for", "10m", "--reason", "validation")
    assert "validation" in run(0, "pools")
    run(0, "resume", "demo")
    run(0, "scale", "demo", "auto")
    (result,) = json.loads(run(0, "test", "--requests", "20", "--concurrency", "8", "--json"))
    assert (result["requests"], result["failed"]) == (20, 0)
    pools = '[[pools]]\nname = "second"\nengine = "sim"\nmodel = "sim"\nmax_workers = 1\npolicy = "static"\n'
    assert "does not divide" in run(1, "apply", "-", stdin=pools + "tensor_parallel_size = 2")
    run(4, "pools", "second")
    run(0, "apply", "-", stdin=pools)
    run(0, "scale", "second", "1", "--wait")
    assert run(0, "generate", "--pool", "second", "--max-tokens", "2", "hi").split()
    run(5, "delete", "second")
    run(0, "delete", "second", "--drain", "--wait")
    run(4, "pools", "second")
    run(0, "health")
    lines = run(0, "events", "--format", "csv").splitlines()
    assert lines[0] == "time,action,target,status"
    for action in (
        "scale_up_start,demo-3,scaling_up",
        "scale_up_complete,demo-3,active",
        "scale_down_start,demo-2,draining",
    ):
        assert any(line.endswith(action) for line in lines), action
    assert "SCALE_UP" in run(0, "decisions", "--skip-holds")
    assert stack.end() == 0
    assert stack.ours() == set()


@pytest.mark.slow
def test_on_a_terminal(tmp_path):
    """A live line that stays one line, and the terminal's own Ctrl-C, which must not reach the processes directly."""
    data = tmp_path / "data"
    command = [sys.executable, "-m", "springtide.cli", "up", "--engine", "sim", "--data-dir", str(data)]
    ports = ["--controlplane-port", "0", "--router-port", "0", "--http-port", "0"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        os.execv(command[0], [*command, *ports])
    seen = b""

    def read_until(words):
        nonlocal seen
        deadline = time.monotonic() + START_S
        while words not in seen:
            ready, _, _ = select.select([terminal], [], [], 1)
            assert time.monotonic() < deadline, seen
            if ready:
                seen += os.read(terminal, 65_536)

    try:
        read_until(b"demo: 1 active, 0 in-flight, 0 waiting")
        assert b"\r\x1b[K" in seen
        os.write(terminal, b"\x03")
        read_until(b"Stopped; no process is left.")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal)
        leftovers.kill(leftovers.markers(data / "nodeagent"))
        for left in leftovers.with_argument(
            data / "config" / f"{name}.toml" for name in ("controlplane", "nodeagent", "router")
        ):
            os.kill(left, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_with_it(up):
    stack = up().wait_for(SERVES)
    assert stack.ours()
    stack.process.kill()
    stack.process.wait(10)
    poll(lambda: stack.ours() == set(), STOP_S, lambda: str(stack.ours()))
    # and the folder is free again, without a hand
    again = up().wait_for(SERVES)
    assert again.end() == 0


@pytest.mark.slow
def test_a_second_ctrl_c_kills(up):
    """A long answer keeps the drain going; the second Ctrl-C does not wait for it."""
    stack = up("--engine-arg=--decode-base-ms=200").wait_for(SERVES)
    with stack.client() as client:
        answer = client.generate("demo", "long", max_tokens=10_000)
        next(answer)
        next(answer)
        stack.process.send_signal(signal.SIGINT)
        stack.process.send_signal(signal.SIGINT)  # the same one, passed on twice by a wrapper
        stack.wait_for("Stopping", 10)
        assert "as told" not in stack.text

        def again():
            stack.process.send_signal(signal.SIGINT)
            return "as told" in stack.text

        poll(again, 10, lambda: stack.text)
        assert stack.process.wait(STOP_S) == 0
        with pytest.raises(SpringtideError):
            for _ in answer:
                pass
    assert stack.ours() == set()


def test_ctrl_c_while_it_starts(up):
    """Also before anything serves, nothing is left."""
    stack = up("--engine-arg=--startup-s=30").wait_for("STARTING")
    assert stack.end() == 0
    assert stack.ours() == set()


@pytest.mark.slow
def test_a_failing_engine_is_told_with_its_log(up):
    stack = up("--engine-arg=--no-such-flag").wait_for("FAILED")
    stack.wait_for("its log: ")
    assert stack.end() == 0
    assert stack.ours() == set()
