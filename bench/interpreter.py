"""Which Python runs our targets: the fastest that is here, since builds of one version differ by a third.

A Python built by hand with the defaults lacks what distributions build theirs with (profile-guided and link-time
optimisation). `bench/setup.sh` makes a second environment with the distribution's own where `.venv` has another one.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.machine import ROOT

SECOND = ROOT / ".venv-bench-python" / "bin" / "python"
_LOOK = """
import json, platform, sys, time
class Thing:
    __slots__ = ("a", "b")
    def __init__(self, a, b):
        self.a, self.b = a, b
def work():
    seen, began = {}, time.process_time()
    for i in range(60000):
        thing = Thing(i, b"x-name: %d" % i)
        seen[i & 255] = thing.b[thing.b.find(b":") + 2:]
    return time.process_time() - began
print(json.dumps({"version": platform.python_version(), "seconds": min(work() for _ in range(7)),
                  "program": sys._base_executable, "build": platform.python_compiler()}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """`seconds`: of a small fixed piece of work, to compare with others here."""

    path: str
    version: str
    program: str
    build: str
    seconds: float


@cache
def interpreters() -> tuple[Interpreter, ...]:
    """Those that can run our targets, the fastest first."""
    found = []
    for path in dict.fromkeys((sys.executable, str(SECOND))):
        if Path(path).exists():
            done = subprocess.run([path, "-c", _LOOK], capture_output=True, text=True, check=True)
            said = json.loads(done.stdout)
            found.append(Interpreter(path, said["version"], said["program"], said["build"], said["seconds"]))
    return tuple(sorted(found, key=lambda each: each.seconds))


def python() -> str:
    """The path of the fastest."""
    return interpreters()[0].path


def told() -> str:
    """For the report."""
    best, *others = interpreters()
    text = f"{best.version} ({best.program}, {best.build})"
    for other in others:
        text += f", which takes {best.seconds / other.seconds:.2f}× the time of the {other.version} in .venv"
    return text
