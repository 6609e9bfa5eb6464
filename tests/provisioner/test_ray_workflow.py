"""`python -m provisioner.ray`, what of it needs no Ray: the folder that says what runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from provisioner.ray.workflow import VARIABLE, ClusterPlan, LocalRay

WAITS = "import sys; sys.stdin.read()"


def test_the_end_of_a_cluster_hits_its_own_processes_only(tmp_path: Path) -> None:
    """PV5: a node that died may have left its pid to somebody else; what carries the cluster's mark is ended."""
    waits = [sys.executable, "-c", WAITS]
    own = {**os.environ, VARIABLE: str(tmp_path)}
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE, env=own) as node,
        subprocess.Popen(waits, stdin=subprocess.PIPE) as stranger,
    ):
        try:
            for gpu, pid in enumerate((node.pid, stranger.pid)):
                (tmp_path / f"node-{gpu:03}.json").write_text(json.dumps({"gpu": gpu, "pid": pid}))
            LocalRay(ClusterPlan(tmp_path, 2)).down()
            assert node.wait(30) != 0
            assert stranger.poll() is None
            assert list(tmp_path.glob("node-*.json")) == []
        finally:
            node.kill()
            stranger.kill()
