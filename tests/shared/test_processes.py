"""Processes of this host: who one is, a signal that hits nobody else, its end, and how it is found again."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from springtide import processes
from springtide.processes import ProcessIdentity

Child = subprocess.Popen[bytes]


@pytest.fixture
def value() -> str:
    """Of the variable that only this test's processes have."""
    return secrets.token_hex(8)


@pytest.fixture
def child(value: str) -> Iterator[Child]:
    """A process with TIDE_TEST=value and an argument `agent`, that runs until its stdin ends."""
    command = [sys.executable, "-c", "print('up', flush=True); input()", "agent"]
    env = {"TIDE_TEST": value, "OTHER": "a=b"}
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    try:
        assert made.stdout is not None
        assert made.stdout.readline() == b"up\n"
        yield made
    finally:
        made.kill()
        made.communicate()


def test_identity_needs_the_start_time(child: Child) -> None:
    """PV3: a pid that was used again is not the process that was meant, and nothing hits it."""
    identity = processes.identify(child.pid)
    assert identity is not None
    assert processes.lives(identity)
    other = ProcessIdentity(identity.boot_id, identity.pid, identity.start_time - 1)
    assert not processes.lives(other)
    assert not processes.kill(other)
    assert not processes.kill(ProcessIdentity("another-boot", identity.pid, identity.start_time))
    assert child.poll() is None
    assert processes.kill(identity)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.identify(child.pid) is None  # a zombie is no process
    assert not processes.kill(identity)


def test_a_dead_child_is_collected_once(child: Child) -> None:
    """Its exit code is told the one time; neither a live child nor somebody else's process has one."""
    assert processes.reap(child.pid) is None
    assert processes.reap(os.getppid()) is None
    identity = processes.identify(child.pid)
    assert identity is not None
    assert processes.kill(identity, signal.SIGTERM)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.reap(child.pid) == -signal.SIGTERM
    assert processes.reap(child.pid) is None
    child.returncode = 0  # it was collected here


def test_processes_are_found_by_their_environment(child: Child, value: str) -> None:
    """PV3: by a variable's whole value, and by a whole argument beside it; each with its environment."""
    ((identity, env),) = processes.with_variable("TIDE_TEST", value)
    assert identity == processes.identify(child.pid)
    assert (env["TIDE_TEST"], env["OTHER"]) == (value, "a=b")
    assert [found for found, _ in processes.with_variable("TIDE_TEST", value, "agent")] == [identity]
    assert not list(processes.with_variable("TIDE_TEST", value, "age"))
    assert not list(processes.with_variable("TIDE_TEST", value[:-1]))
