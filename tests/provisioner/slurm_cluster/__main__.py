"""`python -m tests.provisioner.slurm_cluster FOLDER`: a cluster to play with, until Ctrl-C."""

import signal
import sys
from pathlib import Path

from tests.provisioner.slurm_cluster.cluster import VirtualCluster

cluster = VirtualCluster(Path(sys.argv[1]).absolute())
try:
    cluster.up()
    print(f"export SLURM_CONF={cluster.conf}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
finally:
    cluster.down()
