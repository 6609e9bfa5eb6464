#!/usr/bin/env bash
# A throw-away systemd: this machine's own root file system under a layer in memory, booted by systemd-nspawn. Needs root.
#   container.sh start DIR [FROM:TO ...]   boot, with folders of this machine shown read-only; returns when systemd is up
#   container.sh run DIR COMMAND    run a command in it
#   container.sh root DIR           where its files are seen from here
#   container.sh stop DIR           power off and forget all that was written
# It shares this machine's network, so what listens on loopback inside is reachable from outside.
set -euo pipefail

action=$1
dir=$2
shift 2
root=$dir/root

init_pid() { # systemd of the container: the only child of systemd-nspawn
  pgrep -P "$(cat "$dir/nspawn.pid")" 2>/dev/null | head -n 1
}

inside() {
  local init
  init=$(init_pid)
  [ -n "$init" ] || { echo "the container does not run" >&2; return 1; }
  nsenter --target "$init" --mount --uts --ipc --pid --cgroup --root --wd -- "$@"
}

start() {
  mkdir -p "$dir"
  mount -t tmpfs -o size=1g,mode=755 springtide-test "$dir" # an overlay cannot be the upper layer of another one
  mkdir "$dir/changes" "$dir/work" "$root"
  mount -t overlay -o "lowerdir=/,upperdir=$dir/changes,workdir=$dir/work" springtide-test "$root"

  # Only what a test asks for starts: no unit that a Debian package has enabled, no device or name service of the machine.
  local units=$root/etc/systemd/system unit
  rm -rf "$units"/*.wants "$root/etc/resolv.conf"
  for unit in systemd-udevd systemd-udev-trigger systemd-resolved systemd-networkd systemd-timesyncd systemd-hwdb-update; do
    ln -sf /dev/null "$units/$unit.service"
  done
  rm -f "$root/etc/machine-id"
  systemd-id128 new >"$root/etc/machine-id"
  cat >"$units/springtide-test.target" <<UNIT
[Unit]
Description=What the tests of Springtide's units need
Requires=basic.target
After=basic.target
AllowIsolate=yes
UNIT

  local binds=() shown
  for shown in "$@"; do binds+=("--bind-ro=$shown"); done
  setsid systemd-nspawn "${binds[@]}" --quiet --boot --directory="$root" --machine="springtide-$$" --register=no --keep-unit \
    --console=pipe systemd.unit=springtide-test.target >"$dir/console.log" 2>&1 </dev/null &
  echo $! >"$dir/nspawn.pid"
  for _ in $(seq 300); do
    case $(inside systemctl is-system-running 2>/dev/null || true) in
    running | degraded) return ;;
    esac
    kill -0 "$(cat "$dir/nspawn.pid")" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 30 "$dir/console.log" >&2
  echo "the container did not come up" >&2
  return 1
}

stop() {
  local nspawn init
  nspawn=$(cat "$dir/nspawn.pid" 2>/dev/null || true)
  if [ -n "$nspawn" ]; then
    init=$(init_pid || true)
    [ -z "$init" ] || kill -s RTMIN+4 "$init" 2>/dev/null || true # systemd: power off
    for _ in $(seq 150); do
      kill -0 "$nspawn" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$nspawn" 2>/dev/null || true
    [ -z "$init" ] || kill -KILL "$init" 2>/dev/null || true
  fi
  for _ in $(seq 50); do
    umount "$root" 2>/dev/null && break
    mountpoint -q "$root" || break
    sleep 0.1
  done
  umount "$dir" && rmdir "$dir"
}

case $action in
start) start "$@" || { stop || true; exit 1; } ;;
run) inside "$@" ;;
root) echo "$root" ;;
stop) stop ;;
*) echo "container.sh: start, run, root or stop, not $action" >&2; exit 2 ;;
esac
