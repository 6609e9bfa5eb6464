"""How long a start took, phase by phase: what the agent saw, refined by what engines write into their logs.

Phases, in order, seconds: `slot` (waiting for one of the node's start slots), `process` (from the spawn to the shim's
first answer), `import` (what is left of the time to a healthy engine: imports, process groups, profiling), `load`
(weights), `compile` (compilation and graph capture), `warm_up` (one generated token). A phase that took no time, or of
which nobody tells, is left out; `load` and `compile` are known for vLLM and SGLang.
"""

import re
from collections.abc import Mapping

_LOAD = (
    re.compile(r"Model loading took .{1,40}? and ([\d.]+) seconds"),  # vLLM, with what stands in the next line
    re.compile(r"Load weight end\. elapsed=([\d.]+) s"),  # SGLang
)
_LOAD_ALONE = (re.compile(r"Loading weights took ([\d.]+) seconds"), re.compile(r"Initializing model took ([\d.]+) s"))
_COMPILE = (
    re.compile(r"torch\.compile (?:took|takes) ([\d.]+) s(?:econds)? in total"),
    re.compile(r"Graph capturing finished in ([\d.]+) sec"),
    re.compile(r"Capture .{1,40}? end\. elapsed=([\d.]+) s"),
)


def start_phases(
    *, slot_s: float, process_s: float, healthy_s: float, warm_up_s: float, log: str
) -> Mapping[str, float]:
    """`healthy_s`: from the shim's first answer to a healthy engine; `log`: what the engine wrote meanwhile."""
    load_s = _longest(_LOAD, log) or sum(_longest((pattern,), log) for pattern in _LOAD_ALONE)
    compile_s = sum(_longest((pattern,), log) for pattern in _COMPILE)
    load_s = min(load_s, healthy_s)
    compile_s = min(compile_s, healthy_s - load_s)
    found = {
        "slot": slot_s,
        "process": process_s,
        "import": healthy_s - load_s - compile_s,
        "load": load_s,
        "compile": compile_s,
        "warm_up": warm_up_s,
    }
    return {name: round(seconds, 3) for name, seconds in found.items() if seconds >= 0.0005}


def _longest(patterns: tuple[re.Pattern[str], ...], log: str) -> float:
    """Ranks load side by side and each says how long: the longest counts."""
    return max((float(found) for pattern in patterns for found in pattern.findall(log)), default=0.0)
