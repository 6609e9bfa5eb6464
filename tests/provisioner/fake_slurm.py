"""sbatch, squeue and scancel for tests: their jobs are files in $FAKE_SLURM, and so are their faults.

`faults.json` there: {"sbatch": {"hang_before": true}, ...}. Faults: hang_before and hang_after (its effect), exit
([code, words]), says (stdout instead of the truth), wait_for (a file there), no_json (squeue). `only`: calls with
this in an argument.
"""

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM"])
NAME = Path(sys.argv[0]).name


def main() -> int:
    faults = json.loads((FOLDER / "faults.json").read_text()).get(NAME, {})
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps([NAME, *sys.argv[1:]]) + "\n")
    if not any(faults.get("only", "") in argument for argument in sys.argv):
        faults = {}
    if faults.get("hang_before"):
        time.sleep(600)
    while "wait_for" in faults and not (FOLDER / faults["wait_for"]).exists():
        time.sleep(0.01)
    if faults.get("no_json") and "--json" in sys.argv:
        print("squeue: unrecognized option '--json'", file=sys.stderr)
        return 1
    if "exit" in faults:
        print(faults["exit"][1], file=sys.stderr)
        return int(faults["exit"][0])
    if "says" in faults:
        print(faults["says"])
        return 0
    said = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[NAME](sys.argv[1:])
    if faults.get("hang_after"):
        time.sleep(600)
    sys.stdout.write(said)
    return 0


def jobs() -> dict[int, dict[str, object]]:
    return {int(path.stem): json.loads(path.read_text()) for path in FOLDER.glob("*.job")}


def put(job: dict[str, object]) -> None:
    path = FOLDER / f"{job['job_id']}.job"
    path.with_suffix(".new").write_text(json.dumps(job))
    path.with_suffix(".new").replace(path)


def sbatch(arguments: list[str]) -> str:
    options = dict(argument.partition("=")[::2] for argument in arguments)
    number = max(jobs(), default=100) + 1
    shown = {
        "job_id": number,
        "name": options["--job-name"],
        "comment": options["--comment"],
        "job_state": "PENDING",
        "user_name": "somebody",
        "user_id": os.getuid(),
        "state_reason": "Priority",
    }
    put({**shown, "start_time": 0, "end_time": 0, "time_limit": 60, "preempt_time": 0, "restart_cnt": 0})
    (FOLDER / f"{number}.script").write_text(sys.stdin.read())
    (FOLDER / f"{number}.env").write_text(json.dumps(dict(os.environ)))
    return f"{number}\n"


def squeue(arguments: list[str]) -> str:
    if "--json" in arguments:
        return json.dumps({"meta": {}, "errors": [], "jobs": list(jobs().values())})
    lines = []
    for job in jobs().values():
        fields = (job["job_id"], job["user_id"], job["job_state"], job["state_reason"], "59:30", "0:30", "1:00:00")
        lines.append("\x1f".join(map(str, (*fields, "host-7", job["name"], job["comment"]))))
    return "".join(line + "\n" for line in lines)


def scancel(arguments: list[str]) -> str:
    for number in arguments:
        put({**jobs()[int(number)], "job_state": "CANCELLED"})
    return ""


if __name__ == "__main__":
    sys.exit(main())
