"""What stands in for providers, as separate processes in an environment of their own (scripts/install_clouds.sh)."""

import contextlib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.ports import free_port
from tests.system.stack import wait_for

ROOT = Path(__file__).resolve().parents[2]
CLOUDS = ROOT / ".venv-clouds" / "bin"


@contextlib.contextmanager
def serving(program: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Runs it until the end of the block; its address, once it answers."""
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(address, timeout=5)
        except urllib.error.HTTPError:
            return True
        return True

    with log.open("wb") as out:
        process = subprocess.Popen(program, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(program[0], answers, 60)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def ecs_server(folder: Path) -> Iterator[str]:
    """Moto: the API of ECS without anything that runs."""
    port = free_port()
    with serving([str(CLOUDS / "moto_server"), "-p", str(port)], port, folder / "moto.log") as address:
        yield address


@contextlib.contextmanager
def kubernetes_server(folder: Path) -> Iterator[str]:
    """Pods and secrets of Kubernetes' API: every body is checked against the published schema."""
    port = free_port()
    script = Path(__file__).with_name("fake_kubernetes.py")
    with serving([str(CLOUDS / "python"), str(script), str(port)], port, folder / "kubernetes.log") as address:
        yield address
