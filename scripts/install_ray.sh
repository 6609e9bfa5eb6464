#!/usr/bin/env bash
# Make an environment with Ray for the tests of the provider `ray`, on top of .venv: what that has is not installed again.
#   scripts/install_ray.sh [.venv-ray]
# About 270 MB. Quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

VENV=${1:-.venv-ray}
STAMP="$VENV/.springtide-ray"
wanted=$({ realpath -m "$VENV"; realpath .venv; .venv/bin/python -V; sha256sum requirements/ray.txt scripts/install_ray.sh; } |
  sha256sum | cut -d' ' -f1)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV/bin/ray" ]; then exit 0; fi

rm -f "$STAMP"
step "Making an environment for Ray in $VENV" .venv/bin/python -m venv --clear "$VENV"
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
step "Installing Ray ($(grep -c == requirements/ray.txt) packages, about 90 MB)" \
  nice -n 10 "$VENV/bin/python" -m pip --disable-pip-version-check install --no-input --no-deps --require-hashes \
  -r requirements/ray.txt
echo "import site; site.addsitedir('$packages')" >"$own/springtide_venv.pth" # its own .pth files count, too
step "Asking Ray for its version" "$VENV/bin/python" -c 'import grpc, pytest, ray, springtide; print(ray.__version__)'
echo "$wanted" >"$STAMP"
