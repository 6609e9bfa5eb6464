"""`python -m provisioner.ray up|add|status`: a Ray cluster of this host that grows GPU by GPU.

    up [WORKERS]   the head with GPU 0 and WORKERS nodes with the next ones; stays until Ctrl-C and ends them all
    add            one node more, with the next free GPU; fails when there is none left
    status         its address, and the GPUs that its nodes have

A provisioner of kind ray on it gives a node agent to each Ray node, also to those that are added later.
Exit codes: 0 done, 1 no GPU left or Ray did not start, 2 wrong use, 4 no cluster.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from provisioner.ray.workflow import ClusterPlan, LocalRay
from springtide.errors import InvalidArgument, NotFound, SpringtideError

WATCH_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands; the exit code."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    parser = argparse.ArgumentParser(
        prog="ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("up", "add", "status"))
    parser.add_argument("workers", nargs="?", type=int, default=0, help="of up: nodes beside the head")
    parser.add_argument("--gpus", type=int, help="simulated GPUs of this host; default: the real ones")
    parser.add_argument("--port", type=int, default=6379, help="of the head")
    parser.add_argument("--host", default="127.0.0.1", help="address of this host in the cluster")
    parser.add_argument("--data-dir", type=Path, default=Path(base) / "springtide-ray")
    given = parser.parse_args(argv)
    folder = given.data_dir.expanduser().absolute()
    try:
        if given.command == "up":
            return _up(ClusterPlan(folder, _gpus(given.gpus), given.port, given.host), given.workers)
        cluster = LocalRay.find(folder)
        if given.command == "add":
            print(f"Ray node with GPU {cluster.add()} has joined {cluster.plan.address}.", flush=True)
        else:
            print(f"{cluster.plan.address}  GPUs in use: {cluster.gpus_in_use()} of {cluster.plan.gpus}")
        return 0
    except SpringtideError as error:
        print(f"ray: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 4 if isinstance(error, NotFound) else 1


def _gpus(given: int | None) -> int:
    if given is not None:
        return given
    from springtide.cli.up.options import count_real_gpus

    return count_real_gpus()


def _up(plan: ClusterPlan, workers: int) -> int:
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: told.set())
    cluster = LocalRay(plan)
    cluster.up(workers)
    print(f"Ray cluster at {plan.address} with {workers + 1} nodes. Ctrl-C ends it.", flush=True)
    try:
        while not told.wait(WATCH_S):
            for gpu in cluster.dead():
                print(f"The Ray node with GPU {gpu} has left.", flush=True)
    finally:
        cluster.down()
    print("The Ray cluster has ended.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
