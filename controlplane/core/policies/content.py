"""How a policy is named: `slo`, composed as `slo+predictive`, or in the string form `allocate=X; scaling=Y`.

The string form is a policy's name, or the setting `policy_content`. It holds exactly these two keys. `allocate` names
how routers choose a worker, unless the pool's own routing does; `scaling` names the policy, `static:3` also its count.
"""

import difflib
from collections.abc import Iterable

from springtide.errors import InvalidArgument
from springtide.model.pool import PolicySpec, PoolSpec, RoutingSpec, Setting

ALLOCATE = {"even_load": "least_in_flight", "capability": "capabilities"}
"""What `allocate` may say, and the routing policy that does it."""
CONTENT = "policy_content"
_KEYS = ("allocate", "scaling")


def normalised(spec: PolicySpec) -> tuple[PolicySpec, str | None]:
    """(the spec by plain name, what `allocate` says). Raises InvalidArgument."""
    settings: dict[str, Setting] = dict(spec.settings)
    content = settings.pop(CONTENT, None)
    where = f"policy.settings.{CONTENT}"
    if content is None:
        if "=" not in spec.name:
            return PolicySpec(spec.name, settings), None
        content, where = spec.name, "policy.name"
    if not isinstance(content, str):
        raise _bad(where, content, "it is no text", "policy")
    found = _pairs(where, content)
    if found["allocate"] not in ALLOCATE:
        raise _bad(where, content, f"there is no allocation {found['allocate']!r}", found["scaling"])
    name, _, count = found["scaling"].partition(":")
    if count:
        if name != "static" or not count.isdecimal():
            raise _bad(where, content, f"{found['scaling']!r} is no scaling", "static:3")
        settings["workers"] = int(count)
    return PolicySpec(name, settings), found["allocate"]


def routing_of(spec: PoolSpec) -> RoutingSpec:
    """How routers choose for the pool: by its own routing, else (the default) as the policy's `allocate` says."""
    if spec.routing != RoutingSpec():
        return spec.routing
    try:
        allocate = normalised(spec.policy)[1]
    except InvalidArgument:  # of another version: its pool holds and says so
        return spec.routing
    return spec.routing if allocate is None else RoutingSpec(ALLOCATE[allocate])


def _pairs(where: str, content: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in content.split(";"):
        if not part.strip():
            continue
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals or key not in _KEYS or not value:
            raise _bad(where, content, f"{part.strip()!r} is none of its two parts", "vanilla")
        if key in found:
            raise _bad(where, content, f"{key} is said twice", "vanilla")
        found[key] = value
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise _bad(where, content, f"it does not say {missing[0]}", "vanilla")
    return found


def _bad(where: str, content: object, problem: str, example: str) -> InvalidArgument:
    return InvalidArgument(
        field=where,
        value=content,
        problem=problem,
        remedy=f'Write "allocate=even_load; scaling={example}"; allocate is one of {", ".join(ALLOCATE)}.',
        reason="BAD_POLICY_CONTENT",
    )


def unknown(name: str, known: Iterable[str], *, field: str = "policy.name") -> InvalidArgument:
    """The error for a policy that there is not."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return InvalidArgument(
        field=field,
        value=name,
        problem="there is no such policy",
        remedy=f"{hint}Known: {', '.join(names)}.",
        reason="UNKNOWN_POLICY",
    )
