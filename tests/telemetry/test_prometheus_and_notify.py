"""The metrics endpoint, and systemd's notification protocol on a real socket."""

import asyncio
import os
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from springtide import notify
from springtide.errors import InvalidArgument
from springtide.telemetry import prometheus_server


def test_metrics_on_an_ephemeral_port_and_a_taken_one():
    registry = CollectorRegistry()
    Counter("springtide_things", "Things.", registry=registry).inc(3)
    server = prometheus_server("127.0.0.1", 0, registry)
    assert server is not None
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as answer:
            assert b"springtide_things_total 3.0" in answer.read()
        with pytest.raises(InvalidArgument) as caught:
            prometheus_server("127.0.0.1", server.port, registry)
        assert caught.value.reason == "PORT_IN_USE"
        assert str(server.port) in str(caught.value)
        assert "--metrics-port" in str(caught.value)
    finally:
        server.close()


def test_other_machines_reach_it_only_when_the_network_is_said_to_be_trusted():
    with pytest.raises(InvalidArgument) as caught:
        prometheus_server("0.0.0.0", 0, CollectorRegistry())
    assert (caught.value.field, caught.value.reason) == ("metrics_host", "INSECURE_LISTENER")
    server = prometheus_server("0.0.0.0", 0, CollectorRegistry(), insecure=True)
    assert server is not None
    server.close()


def test_off():
    assert prometheus_server("127.0.0.1", -1) is None


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """A socket that plays systemd; gives back a function that receives one message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield lambda: listener.recv(4096).decode()


def test_messages(systemd):
    assert notify.ready("serving 2\npools")
    assert systemd() == "READY=1\nSTATUS=serving 2 pools"
    notify.status("draining")
    assert systemd() == "STATUS=draining"
    notify.stopping()
    assert systemd() == "STOPPING=1"
    notify.extend_timeout(1.5)
    assert systemd() == "EXTEND_TIMEOUT_USEC=1500000"


def test_nobody_listens(tmp_path):
    assert not notify.notify("READY=1", {})
    assert not notify.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "absent")})
    assert not notify.notify("READY=1", {"NOTIFY_SOCKET": "vsock:1:2"})


def test_abstract_socket():
    name = f"@springtide-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:])
        listener.settimeout(5)
        assert notify.notify("READY=1", {"NOTIFY_SOCKET": name})
        assert listener.recv(64) == b"READY=1"


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, 1.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_interval(environ, interval_s):
    assert notify.watchdog_interval_s(environ) == interval_s


async def test_watchdog_is_fed_only_while_healthy(systemd, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    asked = []

    def healthy():
        asked.append(1)
        return len(asked) != 1  # unhealthy the first time: nothing is sent

    task = asyncio.create_task(notify.feed_watchdog(healthy))
    message = await asyncio.to_thread(systemd)
    task.cancel()
    assert message == "WATCHDOG=1"
    assert len(asked) >= 2


async def test_unwatched_returns_at_once(monkeypatch):
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    await asyncio.wait_for(notify.feed_watchdog(), 1)
