"""systemd's readiness and watchdog protocol. Every call does nothing when NOTIFY_SOCKET is not set."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping


def notify(message: str, environ: Mapping[str, str] | None = None) -> bool:
    """Sends one datagram of `KEY=value` lines. False: there is no socket, or nobody listens on it."""
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address or address[0] not in "/@":
        return False
    if address[0] == "@":  # abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1)
            sender.connect(address)
            sender.sendall(message.encode())
    except OSError:
        return False
    return True


def ready(status: str = "") -> bool:
    """The process serves; units that wait for it may start."""
    return notify(_with_status("READY=1", status))


def status(text: str) -> bool:
    """One line that `systemctl status` shows."""
    return notify(_with_status("", text))


def stopping(status: str = "") -> bool:
    """The process has begun to stop."""
    return notify(_with_status("STOPPING=1", status))


def extend_timeout(seconds: float) -> bool:
    """Asks for so much more time for the start or stop that is going on."""
    return notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def watchdog() -> bool:
    """The process is alive; due more often than `watchdog_interval_s` times two."""
    return notify("WATCHDOG=1")


def watchdog_interval_s(environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds between two `watchdog()` calls (half of what systemd allows); None: nobody watches this process."""
    source = os.environ if environ is None else environ
    try:
        allowed_us = int(source.get("WATCHDOG_USEC", "0"))
        watched_pid = int(source.get("WATCHDOG_PID", "0") or 0)
    except ValueError:
        return None
    if allowed_us <= 0 or watched_pid not in (0, os.getpid()):
        return None
    return allowed_us / 2e6


async def feed_watchdog(healthy: Callable[[], bool] = lambda: True) -> None:
    """Tells systemd until cancelled that the event loop turns, as long as `healthy()`. Returns at once if unwatched."""
    interval_s = watchdog_interval_s()
    while interval_s is not None:
        if healthy():
            watchdog()
        await asyncio.sleep(interval_s)


def _with_status(head: str, text: str) -> str:
    line = "STATUS=" + " ".join(text.split()) if text else ""
    return "\n".join(filter(None, (head, line)))
