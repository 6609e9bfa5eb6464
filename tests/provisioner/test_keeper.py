"""The keeper of an agent on a Ray node, without Ray: it is plain Python that travels there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.ray import keeper
from provisioner.ray.keeper import AgentKeeper
from tests.system.stack import wait_for

AGENT = """#!{python} -IS
import sys, time
for line in range(20_000):
    print("line", line)
print("last words", flush=True)
time.sleep(600)
"""


@pytest.fixture
def talker(tmp_path: Path) -> Iterator[AgentKeeper]:
    """Its agent says a lot and stays."""
    program = tmp_path / "python"
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(0o700)
    plan: dict[str, Any] = {
        "node_id": "n1",
        "flags": [],
        "environ": {},
        "python": str(program),
        "import_path": "",
        "data_dir": str(tmp_path),
        "host": "127.0.0.1",
        "gpus": None,
        "stop_timeout_s": 1.0,
    }
    found = AgentKeeper(plan)
    yield found
    found._agent.kill()
    found._agent.wait(10)


def test_the_log_of_an_agent_is_bounded(talker: AgentKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PV5, rule 10: at each look of its provisioner; the newest lines are kept, in one file."""
    path = tmp_path / "n1" / "agent.log"
    wait_for("all that it says", lambda: path.exists() and path.read_text().endswith("last words\n"))
    assert path.stat().st_size > 200_000
    monkeypatch.setattr(keeper, "MAX_LOG_BYTES", 50_000)
    assert talker.status()["code"] is None
    assert path.stat().st_size <= 25_000 + 100
    assert path.read_text().endswith("line 19999\nlast words\n")
    assert [found.name for found in path.parent.iterdir()] == ["agent.log"]
