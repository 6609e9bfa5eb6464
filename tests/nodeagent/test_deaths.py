"""Why an engine or a shim ended, in the words of exit reports (NA11)."""

from pathlib import Path

import pytest

from nodeagent.deaths import engine_death, shim_death
from springtide import processes
from springtide.model.worker import ExitInfo
from springtide.processes import ProcessIdentity
from springtide.v1.shim_pb2 import ShimStatus


@pytest.mark.parametrize(
    ("status", "stopping", "reason", "told"),
    [
        (None, False, "START_CANCELLED", "before anything ran"),
        (ShimStatus(exit_signal=9), False, "ENGINE_KILLED", "SIGKILL"),
        (ShimStatus(exit_signal=40), False, "ENGINE_KILLED", "signal 40"),
        (ShimStatus(exit_code=3), False, "ENGINE_EXITED", "code 3"),
        (ShimStatus(), False, "ENGINE_EXITED", "code None"),
        (ShimStatus(exit_signal=15), True, "STOPPED", "as asked"),
        (ShimStatus(exit_signal=15, stop_requested=True), False, "STOPPED", "as asked"),
    ],
)
def test_engine(status: ShimStatus | None, stopping: bool, reason: str, told: str) -> None:
    """A real-time signal has no name, and is reported all the same."""
    death = engine_death(status, stopping)
    assert death.reason == reason
    assert told in death.message


def test_shim(tmp_path: Path) -> None:
    """A boot id of another boot, a log that names the port range, or a plain death."""
    log = tmp_path / "shim.log"
    log.write_text("first line\nevery port of 5-6 is in use\n")
    here = ProcessIdentity(processes.boot_id(), 1, 1)
    assert shim_death(ProcessIdentity("another", 1, 1), True, log).reason == "HOST_REBOOTED"
    assert shim_death(here, True, log) == ExitInfo(reason="PORTS_EXHAUSTED", message="every port of 5-6 is in use")
    assert shim_death(here, False, log).reason == "SHIM_DIED"
    assert shim_death(None, False, log).reason == "SHIM_DIED"
