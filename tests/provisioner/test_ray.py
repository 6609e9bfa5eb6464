"""The provider `ray`: its suite runs with the Python of an environment that has Ray (scripts/install_ray.sh)."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"


@pytest.mark.heavy
@pytest.mark.timeout(420)
def test_the_suite_on_a_real_ray_cluster() -> None:
    """PV1, PV5, CP10, CP12, CP15: tests/provisioner/ray_suite.py on three Ray nodes of this host."""
    assert PYTHON.exists(), "scripts/install_ray.sh makes .venv-ray"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(PYTHON), "-m", "pytest", "-q", "-x", "--durations=5", "tests/provisioner/ray_suite.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4000:]
