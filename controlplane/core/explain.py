"""A decision in words: what was seen, which steps the count went through, what would change it. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.model.record import Decision

_STEP = re.compile(r"step_(\d+)_(.+)")
_SEEN: Mapping[str, str] = {
    "active": "ACTIVE workers",
    "starting": "STARTING workers",
    "draining": "DRAINING workers",
    "desired": "workers desired before",
    "min_workers": "min_workers",
    "max_workers": "max_workers",
    "in_flight": "requests in flight",
    "waiting": "requests waiting in routers, or refused within one Retry-After",
    "load": "load (in flight and waiting)",
    "load_at_least": "known part of the load",
    "load_ratio": "load ratio of the ACTIVE workers",
    "load_ratio_with_starting": "load ratio with the STARTING ones",
    "samples": "samples of the load",
    "oldest_sample_age_s": "seconds since the oldest sample",
    "since_scale_up_s": "seconds since the last scale-up",
    "since_scale_down_s": "seconds since the last scale-down",
}
_HINTS: Mapping[str, str] = {
    "AT_MAX": "Raise max_workers to let it grow.",
    "AT_MIN": "Lower min_workers to let it shrink.",
    "UNKNOWN_LOAD": "A node or a router does not report: see `springtide nodes` and `springtide status`.",
    "NOT_STABLE": "It moves when the load has stayed on that side for the whole window.",
    "SCALE_UP_COOLDOWN": "It may move when the cooldown is over; a shorter scale_up_cooldown lets it move sooner.",
    "SCALE_DOWN_COOLDOWN": "It may move when the cooldown is over; a shorter scale_down_cooldown lets it move sooner.",
    "WOULD_CROSS_THRESHOLD": "One worker fewer would be above the upper threshold at once; widen the gap of the two.",
    "LAST_IN_USE": "The last worker goes when no request uses it.",
    "CANNOT_PLACE": "Free or add GPUs that fit, uncordon a node, or loosen the placement.",
    "AWAITS_NODE": "It starts when the node is up: see `springtide nodes` and `springtide provisioners`.",
    "START_BACKOFF": "It is tried again after the back-off; `springtide events` shows why the start failed.",
    "START_ATTEMPTS_EXHAUSTED": "Remove the cause, then `springtide activate` the failed worker.",
    "CRASH_LOOP": "See the end of its log with `springtide workers WORKER`; `activate` starts it again.",
    "NO_VICTIM": "Nobody is taken while requests wait and nothing else could serve them.",
    "POLICY_INVALID": "Correct the pool's policy with `springtide apply`.",
    "POLICY_FAILED": "The plug-in raised; the pool holds until it is mended, other pools go on.",
    "ELASTIC_DISABLED": "Set enable_elastic to let it scale.",
    "STATIC": "Its policy keeps the count; `springtide scale` changes it.",
    "MANUAL": "An operator pinned it; `springtide scale POOL --auto` gives it back to its policy.",
    "HELD": "Scaling is paused; `springtide resume` ends the hold.",
    "NOT_WORTH_IT": "A switch costs more than it would bring; the cost is the mean of the last three start-ups.",
    "NO_PROVISIONER": "No provisioner of the rules is there: see the nodes' label `provisioner`.",
    "MEMORY_HOLDS": "A shorter memory_s or a lower attainment would let it shrink.",
    "FORECAST_HOLDS": "The forecast keeps it: see predictive_down_factor and predictive_lookback_s.",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences. `seen`: signals, counts and bounds; `steps` in order; `settings` as they were; `hints`."""

    seen: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def explain(decision: Decision) -> Explanation:
    inputs = decision.inputs
    steps = sorted((int(found[1]), found[2], str(inputs[key])) for key in inputs if (found := _STEP.fullmatch(key)))
    parts = [f"{key[5:]} {said(value)}" for key, value in inputs.items() if key.startswith("part_")]
    shared = (f"shared out: {', '.join(parts)}",) if parts else ()
    known = {*_SEEN, *(key for key in inputs if _STEP.fullmatch(key) or key.startswith("part_"))}
    return Explanation(
        seen=tuple(f"{words}: {said(inputs[key])}" for key, words in _SEEN.items() if key in inputs),
        steps=(*(f"{stage}: {text}" for _, stage, text in steps), *shared),
        settings=tuple(f"{key} = {said(value)}" for key, value in sorted(inputs.items()) if key not in known),
        hints=tuple(_HINTS[key] for key in (decision.reason,) if key in _HINTS),
    )


def said(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
