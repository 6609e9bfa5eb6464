"""A real SLURM of virtual nodes on one host: slurmctld, one slurmd for each node, munge; no systemd, no cgroups.

`python -m tests.provisioner.slurm_cluster up FOLDER` leaves one running to play with, `down FOLDER` ends it.
"""

from tests.provisioner.slurm_cluster.cluster import VirtualCluster

__all__ = ["VirtualCluster"]
