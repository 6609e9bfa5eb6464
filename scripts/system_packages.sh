#!/usr/bin/env bash
# Install the Debian packages that the heavy tests and `make check` need: only what is missing, and only as root.
# Without root the missing commands are named; the tests that need them then fail and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

# command=package
NEEDED="systemd-nspawn=systemd-container systemd-analyze=systemd dbus-daemon=dbus nsenter=util-linux pgrep=procps
  curl=curl node=nodejs npm=npm
  munged=munge slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client
  kubectl=kubernetes-client
  g++=g++ pkg-config=pkg-config protoc=protobuf-compiler grpc_cpp_plugin=protobuf-compiler-grpc"

missing=()
for pair in $NEEDED; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
done
for pair in grpc++=libgrpc++-dev protobuf=libprotobuf-dev; do # libraries for a client in C++
  pkg-config --exists "${pair%%=*}" 2>/dev/null || missing+=("${pair#*=}")
done
# SLURM's plug-ins bring no command
compgen -G "/usr/lib/*/slurm-wlm/serializer_json.so" >/dev/null || missing+=(slurm-wlm-basic-plugins)
if [ "${#missing[@]}" -eq 0 ]; then exit 0; fi

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "springtide: missing for the heavy tests: ${missing[*]}" >&2
  echo "  what to do: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
step "Reading Debian's package lists" apt-get update
step "Installing from Debian: ${missing[*]}" apt-get install -y --no-install-recommends "${missing[@]}"
