# shellcheck shell=bash
# Sourced by the other scripts: progress in words. `step TEXT COMMAND...` runs a command, says how long it took, and shows
# what it printed only if it failed. On a terminal the seconds and the latest line are shown while it runs.

step_child=
step_log=$(mktemp)

end_step() {
  local status=$?
  trap - EXIT
  if [ -n "$step_child" ]; then
    kill -TERM -- "-$step_child" 2>/dev/null || kill -TERM "$step_child" 2>/dev/null || true
    wait "$step_child" 2>/dev/null || true
  fi
  rm -f "$step_log"
  exit "$status"
}
trap end_step EXIT
trap 'echo >&2; echo "interrupted; start again at any time" >&2; exit 130' INT
trap 'exit 143' TERM

give_up() { # PROBLEM REMEDY
  printf 'springtide: %s\n  what to do: %s\n' "$1" "$2" >&2
  exit 2
}

step() {
  local text=$1 began=$SECONDS status=0 line columns
  shift
  if [ -t 1 ]; then printf '  … %s' "$text"; else echo "  … $text"; fi
  set -m # a process group of its own, so that an interrupted step leaves nothing running
  "$@" >"$step_log" 2>&1 </dev/null &
  step_child=$!
  set +m
  if [ -t 1 ]; then
    columns=$(stty size </dev/tty 2>/dev/null | cut -d' ' -f2) || true
    while kill -0 "$step_child" 2>/dev/null; do
      line=$(grep -v '^WARNING' "$step_log" | tail -n 1 | tr -d '\r' || true)
      line=$(printf '  … %s  %d s  %.40s' "$text" $((SECONDS - began)) "$line")
      printf '\r\033[K%s' "${line:0:${columns:-80}}"
      sleep 0.5
    done
  fi
  wait "$step_child" || status=$?
  step_child=
  if [ -t 1 ]; then printf '\r\033[K'; fi
  if [ "$status" -ne 0 ]; then
    echo "  ✗ $text" >&2
    tail -n 25 "$step_log" >&2
    exit "$status"
  fi
  echo "  ✓ $text ($((SECONDS - began)) s)"
}
