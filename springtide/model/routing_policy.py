"""The routing policies by name and what each may be told: what the control plane checks and what routers read.

A policy itself lives in the router; here are its settings only, since both ends must agree on them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.errors import InvalidArgument
from springtide.model.pool import RoutingSpec, Setting


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting. The default's type is the setting's; `low` and `high` bound numbers."""

    default: int | float | str
    doc: str
    low: float = 0
    high: float = 1e9


_GATE = {
    "most_extra": Knob(8, "Requests that a preferred worker may have above the least loaded one.", 0, 1_000_000),
    "most_ratio": Knob(1.5, "And how many times the load of the least loaded one, plus one.", 1, 1000),
}
_PREFIX = {
    "chunk_bytes": Knob(256, "Prompts are compared in chunks of so many bytes.", 16, 65536),
    "max_chunks": Knob(65_536, "Chunks that one router remembers; the least recently used are forgotten.", 64, 4e6),
}
ROUTING_POLICIES: Mapping[str, tuple[str, Mapping[str, Knob]]] = {
    "least_in_flight": ("The worker with the fewest requests, slow start considered.", {}),
    "round_robin": ("One after the other.", {}),
    "random": ("Any.", {}),
    "power_of_two": (
        "The least loaded of a few drawn at random: many routers do not all choose the same.",
        {"choices": Knob(2, "Workers that are drawn.", 2, 64)},
    ),
    "weighted": (
        "In turn, in proportion to capacity, slow start considered.",
        {"label": Knob("weight", "Label that holds a worker's weight; without it its max_in_flight is the weight.")},
    ),
    "least_kv": ("The worker with the least used KV cache, corrected by what was sent since the last report.", {}),
    "request_cost": (
        "The least work ahead: tokens in flight over throughput, plus a penalty for a full KV cache.",
        {
            "tokens_per_s": Knob(2000, "Throughput of one worker.", 1, 1e7),
            "kv_weight": Knob(0.15, "Weight of k / (1 - k), k being the use of the KV cache.", 0, 1000),
            "output_tokens": Knob(256, "Expected tokens of an answer until some were seen.", 1, 1e6),
        },
    ),
    "prefix_aware": (
        "The worker that saw the longest part of the prompt before; the least loaded one while that is unbalanced.",
        {**_PREFIX, **_GATE, "least_share": Knob(0.25, "Share of the prompt that must be known.", 0, 1)},
    ),
    "kv_cost": (
        "The least prefill still to do, known prefixes taken off, plus what is being decoded.",
        {
            **_PREFIX,
            "overlap_weight": Knob(1.0, "Weight of the prefill against the decoding.", 0, 1000),
            "output_tokens": Knob(256, "Expected tokens of an answer until some were seen.", 1, 1e6),
        },
    ),
    "sticky": (
        "One session on one worker while that is balanced; a request without a session goes to the least loaded.",
        {
            **_GATE,
            "by": Knob("session", "session (x-session-id, session_id, user) or request_id."),
            "max_sessions": Knob(65_536, "Sessions that one router remembers.", 16, 4e6),
        },
    ),
    "capabilities": (
        "Of the workers with the labels that are asked for, one that the fewest other requests could need.",
        _GATE,
    ),
}


def routing_settings(spec: RoutingSpec, field: str = "routing") -> dict[str, int | float | str]:
    """The policy's settings, defaults filled in. Raises InvalidArgument for an unknown name or key or a bad value."""
    known = ROUTING_POLICIES.get(spec.name)
    if known is None:
        raise _unknown(f"{field}.name", spec.name, "there is no such routing policy", ROUTING_POLICIES)
    knobs = known[1]
    for key, value in spec.settings.items():
        if key not in knobs:
            raise _unknown(f"{field}.settings.{key}", value, f"{spec.name} has no such setting", knobs, key)
        _check(f"{field}.settings.{key}", value, knobs[key])
    return {key: spec.settings.get(key, knob.default) for key, knob in knobs.items()}  # type: ignore[misc]


def _check(field: str, value: Setting, knob: Knob) -> None:
    if isinstance(knob.default, str):
        if (
            not isinstance(value, str)
            or not value
            or (field.endswith(".by") and value not in ("session", "request_id"))
        ):
            raise InvalidArgument(field=field, value=value, problem="is not understood", remedy=knob.doc)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(knob.default, int)
    if not number or not knob.low <= value <= knob.high or (whole and value != int(value)):  # type: ignore[arg-type, operator]
        kind = "a whole number" if whole else "a number"
        bounds = f"{knob.low:g} to {knob.high:g}"
        raise InvalidArgument(
            field=field, value=value, problem=f"is not {kind} from {bounds}", remedy=f"Leave it out for {knob.default}."
        )


def _unknown(field: str, value: Setting, problem: str, known: Mapping[str, object], wrong: str = "") -> InvalidArgument:
    near = difflib.get_close_matches(wrong or str(value), known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    listed = f"Known: {', '.join(sorted(known))}." if known else "It takes none."
    reason = "UNKNOWN_SETTING" if wrong else "UNKNOWN_POLICY"
    return InvalidArgument(field=field, value=value, problem=problem, remedy=f"{hint}{listed}", reason=reason)
