"""A real SLURM of virtual nodes on one host: slurmctld, one slurmd for each node, munge; no systemd, no cgroups.

`python -m tests.provisioner.slurm_cluster up FOLDER` leaves one running to play with, `down FOLDER` ends it.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.provisioner.slurm_cluster.cluster import VirtualCluster

__all__ = ["VirtualCluster", "running_cluster"]


@contextlib.contextmanager
def running_cluster() -> Iterator[VirtualCluster]:
    """Its folder has a short name (munge's socket is in it) and is gone afterwards, as all processes are."""
    root = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    found = VirtualCluster(root)
    try:
        yield found.up()
    finally:
        found.down()
        shutil.rmtree(root, ignore_errors=True)
