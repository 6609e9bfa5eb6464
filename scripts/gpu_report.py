"""Turn the JSON reports of `make test-gpu` into a page: scripts/gpu_report.py REPORT.json... > docs/gpu/report-DATE.md

Several reports of one host make one page; of an engine that is in two of them, the later one counts.
"""

import json
import sys
from pathlib import Path
from typing import Any

STEPS = {
    "one_worker_starts": "one worker (TP=1) starts",
    "streams_over_http_and_grpc": "whole streams over HTTP and gRPC",
    "a_client_that_leaves_frees_the_engine": "eight clients hang up: the engine is idle",
    "one_two_one_under_load": "1 → 2 → 1 workers under load",
    "asleep_and_awake": "a worker sleeps and wakes",
    "weights_change_in_place": "weights change in place, version stamped",
    "a_killed_api_process_is_replaced_whole": "SIGKILL of the API process",
    "one_worker_on_two_gpus": "one worker on two GPUs (TP=2)",
    "one_two_one_of_two_gpus_each_under_load": "1 → 2 → 1 workers of two GPUs each under load",
    "a_killed_rank_is_replaced_whole": "SIGKILL of one tensor-parallel rank",
    "nothing_is_left": "stop: nothing is left",
}
MARKS = {"passed": "yes", "failed": "**no**", "skipped": "not run"}


def page(reports: list[dict[str, Any]]) -> str:
    """Markdown."""
    host = reports[-1]["host"]
    cards = host["cards"]
    shown = f"{len(cards)} × {cards[0]}, driver {host['driver']}" if cards else "no GPU (a trial of the suite)"
    lines = [f"# GPU proof, {reports[-1].get('date', 'no date')}", ""]
    lines += [f"Host: {shown}; {host['cores']} cores, {host['memory_gib']} GiB; Python {host['python']}.", ""]
    lines += [
        "What each step does and asserts: `tests/gpu/test_proof.py`. Memory is NVML's, in MiB above the idle host's,"
    ]
    lines += ["one number for each GPU. `–`: not measured.", ""]
    engines: dict[str, Any] = {}
    for report in reports:
        engines |= report["engines"]
    for name, engine in engines.items():
        lines += [f"## {name} {engine['version']}", "", f"Flags: `{' '.join(engine['args'])}`", ""]
        lines += ["| step | as it should | s | found |", "| --- | --- | --- | --- |"]
        for step, entry in engine["steps"].items():
            mark = MARKS.get(entry["outcome"], entry["outcome"])
            mark = "not tried" if "not_tried" in entry["facts"] else mark
            found = "; ".join(f"{key} {_short(value)}" for key, value in entry["facts"].items())
            lines.append(f"| {STEPS.get(step, step)} | {mark} | {entry['seconds']:.1f} | {found} |")
        lines.append("")
        for step, entry in engine["steps"].items():
            if entry["outcome"] == "failed":
                why = entry["why"].strip().splitlines()
                said = [line[2:].strip() for line in why if line.startswith("E ")] or why[-1:]
                lines += [f"{STEPS.get(step, step)}:", "", "```", *said[:12], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _short(value: object) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " / ".join(_short(part) for part in value)
    return str(value).replace("|", "\\|").replace("\n", " ")[:160]


if __name__ == "__main__":
    print(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]), end="")
