#!/usr/bin/env bash
# What `make bench` needs, in places of its own: the peers from PyPI in .venv-bench, nginx and haproxy from Debian unpacked
# (not installed, no service is started) in .venv-bench/debian, the mock engine and the load client compiled in build/bench,
# and the distribution's own Python for our targets in .venv-bench-python where .venv has one that was built by hand.
# Quick when nothing changed. Without gcc, or without apt-get, that part is left out and the benchmark says so.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

VENV=.venv-bench
DEBIAN=$VENV/debian
NATIVE=build/bench
SECOND=.venv-bench-python
DEBIAN_PACKAGES="nginx nginx-common haproxy liblua5.3-0 libopentracing1 libopentracing-c-wrapper0"

same() { [ "$(cat "$VENV/.$1" 2>/dev/null)" = "$2" ]; }

wanted=$({ pwd -P; sha256sum bench/requirements.txt; } | sha256sum | cut -d' ' -f1)
if ! same pypi "$wanted"; then
  step "Making a Python environment for the peers in $VENV" "${PYTHON:-python3}" -m venv --clear "$VENV"
  step "Installing the peers ($(grep -c '==' bench/requirements.txt) packages)" "$VENV/bin/python" -m pip \
    --disable-pip-version-check install --no-input --no-deps --only-binary :all: --require-hashes -r bench/requirements.txt
  echo "$wanted" >"$VENV/.pypi"
fi

# A hand-built Python usually lacks the optimisations of a distribution's; bench/interpreter.py takes the faster one.
own=$(readlink -f .venv/bin/python)
system=$(readlink -f /usr/bin/python3 2>/dev/null || true)
wanted=$({ pwd -P; echo "$system"; sha256sum requirements/lock.txt; } | sha256sum | cut -d' ' -f1)
if [ -n "$system" ] && [ "$own" != "$system" ] && [ "$(cat "$SECOND/.springtide" 2>/dev/null)" != "$wanted" ] &&
  "$system" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  rm -rf "$SECOND"
  if (step "Making an environment of $system in $SECOND" "$system" -m venv --without-pip "$SECOND") &&
    (step "Installing our libraries in it" .venv/bin/python -m pip --python "$SECOND/bin/python" --disable-pip-version-check \
      install --no-input --no-deps --only-binary :all: --require-hashes -r requirements/lock.txt); then
    echo "$wanted" >"$SECOND/.springtide"
  else
    rm -rf "$SECOND"
    echo "bench: our targets run on .venv's Python: $system could not be set up" >&2
  fi
fi

unpack_debian() {
  local folder
  folder=$(mktemp -d)
  # shellcheck disable=SC2086
  (cd "$folder" && { apt-get -q download $DEBIAN_PACKAGES || { apt-get -q update && apt-get -q download $DEBIAN_PACKAGES; }; })
  rm -rf "$DEBIAN"
  for package in "$folder"/*.deb; do dpkg -x "$package" "$DEBIAN"; done
  rm -rf "$folder"
}

if command -v apt-get >/dev/null && ! same debian "$DEBIAN_PACKAGES"; then
  if (step "Fetching nginx and haproxy from Debian" unpack_debian); then
    echo "$DEBIAN_PACKAGES" >"$VENV/.debian"
  else
    echo "bench: nginx and haproxy are left out: apt-get could not fetch them" >&2
  fi
fi

if command -v gcc >/dev/null; then
  mkdir -p "$NATIVE"
  for name in engine load; do
    if [ ! -x "$NATIVE/$name" ] || [ -n "$(find bench/native -newer "$NATIVE/$name")" ]; then
      step "Compiling the benchmark's $name" gcc -O2 -Wall -Wextra -o "$NATIVE/$name" "bench/native/$name.c"
    fi
  done
else
  echo "bench: no gcc: load and mock engine run in Python, the gRPC figures are left out" >&2
fi
