#!/usr/bin/env bash
# Install buf, which lints the protos and finds breaking changes, into node_modules. Quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

STAMP=node_modules/.springtide

wanted=$(sha256sum package-lock.json)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
command -v npm >/dev/null ||
  give_up "buf checks the protos and comes from npm, which is not installed" \
    "install it (Debian, Ubuntu: apt-get install --no-install-recommends nodejs npm) and start again"
# The binary is part of the package; its install script is not needed.
step "Installing buf" npm ci --ignore-scripts --no-audit --no-fund --no-progress
echo "$wanted" >"$STAMP"
