"""The script of a job: starts the node agent, passes warnings on to it, and leaves nothing on the node. Pure."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from provisioner.slurm.settings import SlurmSettings

_MARGIN_S = 2  # between the agent's deadline and the job's end


@dataclass(frozen=True, slots=True)
class Node:
    """What one job runs."""

    node_id: str
    controlplane: str  # host:port
    python: str
    import_path: str = ""  # of a source tree that is not installed
    labels: Mapping[str, str] | None = None


def script(settings: SlurmSettings, node: Node) -> str:
    """Bash. Exit code 0 when the agent was told to leave and left nothing."""
    return _TEMPLATE.format(
        preamble=settings.preamble,
        folder=_in_shell(settings.data_dir),
        python=_in_shell(node.python),
        import_path=_in_shell(node.import_path),
        host=_host(settings, node),
        config=_config(settings, node),
        gpus=_GPUS if settings.simulated_gpus else "",
        margin_s=_MARGIN_S,
        notice_s=max(settings.notice_s, settings.preempt_grace_s),
    )


def _host(settings: SlurmSettings, node: Node) -> str:
    if settings.agent_host:
        return f"host={_in_shell(settings.agent_host)}"
    name, _, port = node.controlplane.rpartition(":")
    target = shlex.quote(name.strip("[]"))
    return f'host=$("$python" -c {shlex.quote(_OWN_ADDRESS)} {target} {int(port)}) || exit 73'


def _config(settings: SlurmSettings, node: Node) -> str:
    """nodeagent.toml; `$host` and the interpreters' variables are the shell's to fill in."""
    grace_s = max(1, settings.preempt_grace_s - _MARGIN_S)
    values: dict[str, object] = {
        "controlplane": [node.controlplane],
        "node_id": node.node_id,
        "insecure": settings.agent_insecure,
        "stop_action": "drain",
        "stop_timeout_s": float(grace_s),
        "notice_s": float(grace_s),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in settings.agent_options]
    lines += [f"{key} = {value}" for key, value in settings.agent_options.items()]
    lines = [_literal(line) for line in lines]
    lines += ['data_dir = "$folder/agent"', 'host = "$host"', 'notice_file = "$folder/notice"', "$gpus_line"]
    lines += ["", "[labels]", *(_literal(f"{_key(k)} = {json.dumps(v)}") for k, v in (node.labels or {}).items())]
    lines += ['"slurm/job" = "$SLURM_JOB_ID"', '"slurm/node" = "$SLURMD_NODENAME"']
    if settings.resources:
        lines += ["", "[resources]", *(_literal(f"{_key(k)} = {v}") for k, v in settings.resources.items())]
    if settings.allowed_flags:
        lines += ["", "[launch]", _literal(f"allowed_flags = {json.dumps(list(settings.allowed_flags))}")]
    if settings.interpreters:
        lines += ["", "[launch.interpreters]"]
        lines += [f'{_literal(_key(engine))} = "{path}"' for engine, path in settings.interpreters.items()]
    return "\n".join(lines)


def _key(key: str) -> str:
    return json.dumps(key)


def _literal(text: str) -> str:
    """For a here-document: nothing in it is the shell's."""
    return text.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")


def _in_shell(text: str) -> str:
    """In double quotes: variables count, words are not split, commands are not run."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$(", "\\$(") + '"'


_OWN_ADDRESS = (
    "import socket,sys;i=socket.getaddrinfo(sys.argv[1],int(sys.argv[2]),type=socket.SOCK_DGRAM)[0];"
    "s=socket.socket(i[0],i[1]);s.connect(i[4]);print(s.getsockname()[0])"
)
_GPUS = """
IFS=, read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-}"
gpus_line="gpus = ${#visible[@]}"
unset CUDA_VISIBLE_DEVICES"""
_TEMPLATE = """#!/bin/bash
# The agent of one Springtide node. SIGTERM (a warning before the end) makes it drain.
umask 077
{preamble}
folder={folder}
python={python}
import_path={import_path}
if [ -n "$import_path" ]; then export PYTHONPATH="$import_path${{PYTHONPATH:+:$PYTHONPATH}}"; fi
mkdir -p "$folder/agent" || exit 71
gpus_line={gpus}
{host}
cat > "$folder/nodeagent.toml" <<END_OF_SETTINGS || exit 72
{config}
END_OF_SETTINGS

told= agent= code=0 failures=0
# A warning: how long this job still has (a preemption's grace, or up to the time limit) is what the agent announces.
# Where SLURM does not say it at once, the agent assumes its own notice_s.
pass_on() {{
  local left
  told=1
  left=$(timeout 2 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L 2>/dev/null | awk -F: '
    /^[0-9:-]+$/ {{ if (split($1, day, "-") == 2) $1 = day[1] * 24 + day[2]
                  for (i = 1; i <= NF; i++) s = s * 60 + $i
                  s -= {margin_s}; if (s > {notice_s}) s = {notice_s}; print (s < 1 ? 1 : s) }}')
  if [ -n "$left" ]; then
    echo "$left" > "$folder/notice.new" && mv "$folder/notice.new" "$folder/notice" && return
  fi
  if [ -n "$agent" ]; then kill -USR1 "$agent" 2>/dev/null; fi
}}
trap pass_on TERM INT
while [ -z "$told" ]; do
  "$python" -m nodeagent --config "$folder/nodeagent.toml" &
  agent=$!
  if [ -n "$told" ]; then kill -TERM "$agent" 2>/dev/null; fi
  while :; do
    wait "$agent"
    code=$?
    kill -0 "$agent" 2>/dev/null || break
  done
  agent=
  # 0: it was told to leave; 2: its settings cannot work. An agent that crashed finds its engines again.
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$failures" -ge 5 ]; then break; fi
  failures=$((failures + 1))
  sleep 1 &
  wait $!
done
if [ "$code" = 0 ]; then rm -rf -- "$folder"; fi
exit "$code"
"""
