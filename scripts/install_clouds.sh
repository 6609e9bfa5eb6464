#!/usr/bin/env bash
# Make an environment with what stands in for providers in tests: a server that answers as ECS does, and Kubernetes'
# published API schemas.
#   scripts/install_clouds.sh [.venv-clouds]
# About 300 MB. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

VENV=${1:-.venv-clouds}
STAMP="$VENV/.springtide-clouds"
wanted=$({ realpath -m "$VENV"; realpath .venv; .venv/bin/python -V; sha256sum requirements/clouds.txt scripts/install_clouds.sh; } |
  sha256sum | cut -d' ' -f1)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV/bin/moto_server" ]; then exit 0; fi

rm -f "$STAMP"
step "Making an environment for stand-ins of providers in $VENV" .venv/bin/python -m venv --clear "$VENV"
step "Installing them ($(grep -c == requirements/clouds.txt) packages, about 80 MB)" \
  nice -n 10 "$VENV/bin/python" -m pip --disable-pip-version-check install --no-input --no-deps --require-hashes \
  -r requirements/clouds.txt
echo "$wanted" >"$STAMP"
