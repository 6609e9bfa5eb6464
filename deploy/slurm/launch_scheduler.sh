#!/usr/bin/env bash
# Serves a model on SLURM nodes from a login node, in the foreground; everything given is for `springtide serve-slurm`:
#   deploy/slurm/launch_scheduler.sh --model meta-llama/Llama-3-70B-Instruct --tensor-parallel-size 4 --max-nodes 16
# The address is in .scheduler_url beside where it is called. Ctrl-C stops it; its jobs stay and are found again.
set -euo pipefail
exec springtide serve-slurm --advertise-file "${SCHEDULER_URL_FILE:-$PWD/.scheduler_url}" "$@"
