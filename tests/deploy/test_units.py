"""The systemd units: checked by systemd, and run for real by a systemd in a container."""

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from springtide.cli.up import leftovers
from springtide.client import Finished, Springtide, Tokens
from springtide.errors import SpringtideError
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
SOURCE, ENVIRONMENT = "/opt/springtide/source", "/opt/springtide/environment"
CONTAINER = Path(__file__).with_name("container.sh")
AGENT = "springtide-nodeagent@gpu.service"
ALL = ("springtide-controlplane.service", AGENT, "springtide-router.service")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]


def test_systemd_finds_nothing_to_say(tmp_path):
    """NA15: `systemd-analyze verify` ends well and prints nothing (it ends well even for unknown keys)."""
    for unit in UNITS.glob("*.service"):
        shutil.copy(unit, tmp_path / unit.name.replace("@.", "@gpu."))
    for unit in sorted(tmp_path.glob("*.service")):
        command = ["systemd-analyze", "verify", "--man=no", f"./{unit.name}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), unit.name


@pytest.mark.parametrize(("name", "at_most"), [("controlplane", 20), ("router", 20), ("nodeagent@", 60)])
def test_hardening_does_not_slip(tmp_path, name, at_most):
    """Exposure as systemd rates it, times ten; the agent needs devices and child processes."""
    unit = tmp_path / f"springtide-{name}.service".replace("@.", "@gpu.")
    shutil.copy(UNITS / f"springtide-{name}.service", unit)
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={at_most}", f"./{unit.name}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]


class Machine:
    """A container with the units, the samples and this source tree."""

    def __init__(self, folder):
        self.folder = folder
        self.root = folder / "root"
        self.controlplane, self.router = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    def container(self, action, *arguments, timeout_s=60):
        command = [str(CONTAINER), action, str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)

    def systemctl(self, *arguments, timeout_s=90):
        done = self.container("run", "systemctl", *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"{arguments}: {done.stderr}{self.told()}"
        return done.stdout.strip()

    def show(self, unit, name):
        return self.systemctl("show", "--value", "--property", name, unit)

    def told(self):
        """Why it did not work, for the message of a failing test."""
        status = self.container("run", "systemctl", "status", "--no-pager", "--lines=15", *ALL)
        journal = self.container("run", "journalctl", "--no-pager", "--lines=60", "--output=cat")
        return f"\n{status.stdout}\n{journal.stdout}"[-8000:]

    def client(self):
        return Springtide(self.controlplane, self.router)

    def engines(self):
        """Pids of shims, guards and engines."""
        marks = leftovers.markers(self.root / "var/lib/springtide-nodeagent-gpu")
        return {pid for pid, _ in leftovers.left(marks)}

    def install(self):
        self._write("etc/springtide/controlplane.toml", self._sample("controlplane", listen=self.controlplane) + POOL)
        agent = self._sample("nodeagent", gpus=2, stop_timeout_s=30.0)
        agent = agent.replace('"127.0.0.1:7400"', f'"{self.controlplane}"')
        self._write("etc/springtide/nodeagent-gpu.toml", agent)
        router = self._sample("router", controlplane=self.controlplane, listen=self.router, http_listen="127.0.0.1:0")
        self._write("etc/springtide/router.toml", router)
        # An installation: the environment and the source tree of this test, whoever the unit's user is.
        start = f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {ENVIRONMENT}/bin/python -m springtide.cli "$@"\n'
        self._write("opt/springtide/bin/springtide", start, 0o755)
        self._write(
            "opt/springtide/bin/springtide-nodeagent-stop", (UNITS / "springtide-nodeagent-stop").read_text(), 0o755
        )
        interpreter = Path(sys.executable).resolve()
        for parent in interpreter.parents:
            inside = self.root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o055)
        for unit in UNITS.glob("*.service"):
            self._write(f"etc/systemd/system/{unit.name}", unit.read_text())
            if str(interpreter).startswith(("/root", "/home")):
                self._write(f"etc/systemd/system/{unit.name}.d/home.conf", "[Service]\nProtectHome=no\n")
        quick = "[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\n"
        self._write("etc/systemd/system/springtide-router.service.d/quick.conf", quick)
        self._write("usr/lib/sysusers.d/springtide.conf", (UNITS / "springtide.sysusers").read_text())
        assert self.container("run", "systemd-sysusers").returncode == 0
        self.systemctl("daemon-reload")

    def _sample(self, name, **values):
        text = (ROOT / "deploy" / "config" / f"{name}.toml").read_text()
        given = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in values.items())
        return given + text

    def _write(self, path, text, mode=0o644):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)


POOL = """
[[pools]]
name = "demo"
engine = "sim"
model = "sim"
min_workers = 1
max_workers = 2
policy = "static"
engine_args = ["--decode-base-ms=40"]
"""


def poll(condition, timeout_s, told=lambda: ""):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path / "machine")
    # Shown at a place of their own: units have a /tmp and a /home of their own, where a clone may well lie.
    started = made.container("start", f"{ROOT}:{SOURCE}", f"{sys.prefix}:{ENVIRONMENT}")
    try:
        assert started.returncode == 0, started.stderr
        made.install()
        yield made
    finally:
        made.container("stop")


class Stream(threading.Thread):
    """One generation, read in a thread of its own: (tokens, finished) or the error."""

    def __init__(self, client, tokens):
        super().__init__(daemon=True)
        self.tokens, self.finished, self.error = 0, False, None
        self._events = client.generate("demo", "a long answer", max_tokens=tokens)
        self.start()
        poll(lambda: self.tokens > 2 or self.error, 20)

    def run(self):
        try:
            for event in self._events:
                self.tokens += isinstance(event, Tokens)
                self.finished = self.finished or isinstance(event, Finished)
        except SpringtideError as error:
            self.error = error


def serves(machine, client):
    def answers():
        try:
            return len(client.text("demo", "hello", max_tokens=2).split()) == 2
        except SpringtideError:
            return False

    poll(answers, 40, machine.told)


def test_units_for_real(machine):
    """NA15: the units start in order and say READY; a restart of the agent leaves engines and streams alone; its stop
    drains; a killed agent comes back; a router that hangs is restarted; nothing is left."""
    machine.systemctl("start", *ALL)
    assert all(machine.show(unit, "StatusText") for unit in ALL)
    with machine.client() as client:
        serves(machine, client)
        engines = machine.engines()
        assert len(engines) >= 2, machine.told()
        (before,) = client.workers()

        # A restart of the agent's unit: the same processes, the same incarnation, an open stream goes on.
        stream = Stream(client, tokens=150)
        agent = machine.show(AGENT, "MainPID")
        machine.systemctl("restart", AGENT)
        assert machine.show(AGENT, "MainPID") != agent
        assert machine.engines() == engines
        stream.join(60)
        assert (stream.error, stream.finished, stream.tokens) == (None, True, 150), machine.told()

        # The same when it is killed.
        agent = machine.show(AGENT, "MainPID")
        machine.container("run", "kill", "-KILL", agent)
        poll(lambda: machine.show(AGENT, "SubState") == "running" and machine.show(AGENT, "MainPID") != agent, 20)
        assert machine.engines() == engines
        serves(machine, client)
        (after,) = client.workers()
        assert (after.worker_id, after.incarnation) == (before.worker_id, before.incarnation)

        # A router that hangs is noticed by the watchdog.
        machine.container("run", "kill", "-STOP", machine.show("springtide-router.service", "MainPID"))
        poll(lambda: int(machine.show("springtide-router.service", "NRestarts")) >= 1, 30, machine.told)
        serves(machine, client)

        # A stop for good: the running answer finishes, then nothing is left.
        stream = Stream(client, tokens=60)
        machine.systemctl("stop", AGENT)
        stream.join(30)
        assert (stream.error, stream.finished, stream.tokens) == (None, True, 60), machine.told()
        assert machine.engines() == set(), machine.told()
        assert machine.show(AGENT, "Result") == "success"
        assert "scale_down_complete" in [event.action for event in client.events()]
    machine.systemctl("stop", *ALL)
    for unit in ALL:
        assert machine.show(unit, "Result") == "success", machine.told()


def test_a_wrong_configuration_is_said_once(machine):
    """A key that does not exist: exit 2, one clear line, and no restart loop."""
    machine._write("etc/springtide/router.toml", "lissen = 1\n")
    assert machine.container("run", "systemctl", "start", "springtide-router.service").returncode != 0
    assert machine.show("springtide-router.service", "NRestarts") == "0"
    assert machine.show("springtide-router.service", "ExecMainStatus") == "2"
    journal = machine.container("run", "journalctl", "--unit=springtide-router", "--output=cat").stdout
    assert re.search(r"lissen.*Did you mean listen\?", journal), journal
