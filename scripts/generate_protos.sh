#!/usr/bin/env bash
# Generate springtide/v1 from protos/springtide/v1: messages, services and their type stubs.
#   scripts/generate_protos.sh           write springtide/v1
#   scripts/generate_protos.sh --check   fail if springtide/v1 is not what the protos give
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=.venv/bin/python

generate() { # OUT_DIR
  PATH="$PWD/.venv/bin:$PATH" "$PYTHON" -m grpc_tools.protoc -I protos \
    --python_out="$1" --grpc_python_out="$1" --mypy_out=quiet:"$1" --mypy_grpc_out=quiet,only_async:"$1" \
    protos/springtide/v1/*.proto
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
generate "$work"
: >"$work/springtide/v1/__init__.py"
if [ "${1:-}" = --check ]; then
  if ! diff -r -q -x __pycache__ -x __init__.py "$work/springtide/v1" springtide/v1; then
    echo "springtide/v1 is not what the protos give; run: make protos" >&2
    exit 1
  fi
else
  for old in springtide/v1/*_pb2*; do # what no proto gives any more; the rest is replaced, for those who import it now
    if [ ! -e "$work/$old" ]; then rm "$old"; fi
  done
  cp "$work"/springtide/v1/*_pb2* springtide/v1/
fi
