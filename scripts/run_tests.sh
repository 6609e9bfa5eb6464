#!/usr/bin/env bash
# Every test, in two parts: those without a mark `heavy` on all cores, then those that take the machine for themselves, one
# by one.
#   scripts/run_tests.sh [pytest arguments]
# A few real-process tests that failed are run a second time, alone: what passes then is named as FLAKY, never silently.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTEST=".venv/bin/python -m pytest"
MAY_REPEAT=4 # more failures than this are no accident of a busy machine
NOTHING=5    # pytest's exit code when no test was selected

failed=0
run() { # NAME pytest arguments
  local name=$1 status
  shift
  echo "== tests: $name"
  $PYTEST "$@"
  status=$?
  if [ "$status" -ne 0 ] && [ "$status" -ne "$NOTHING" ]; then failed=$status; fi
}

run "on all cores" -m "not heavy" -n auto --dist loadfile "$@"
if [ "$failed" -gt 1 ]; then exit "$failed"; fi # interrupted or unusable, not failed tests
run "heavy, one by one" -m "heavy" "$@"
if [ "$failed" -ne 1 ]; then exit "$failed"; fi

count=$($PYTEST --last-failed --last-failed-no-failures none --collect-only -q 2>/dev/null | grep -c '::')
if [ "$count" -eq 0 ] || [ "$count" -gt "$MAY_REPEAT" ]; then
  echo "== tests: $count failed" >&2
  exit 1
fi
echo "== tests: FLAKY or broken, $count of them: once more, alone"
$PYTEST --last-failed --last-failed-no-failures none "$@"
