"""Scaling policies by name. Each is one small module with the interface of controlplane.core.policy."""

import difflib
from collections.abc import Callable, Mapping

from controlplane.core.policies.load_ratio import LoadRatio
from controlplane.core.policies.static import Static
from controlplane.core.policy import Policy
from springtide.errors import InvalidArgument
from springtide.model.pool import PolicySpec, Setting

Factory = Callable[[Mapping[str, Setting], int, int], Policy]

REGISTRY: Mapping[str, Factory] = {
    "load_ratio": LoadRatio.read,
    "static": Static.read,
    "no": Static.read,
}


def make_policy(spec: PolicySpec, min_workers: int, max_workers: int) -> Policy:
    """The policy that a pool names, its settings checked. Raises InvalidArgument."""
    factory = REGISTRY.get(spec.name)
    if factory is None:
        near = difflib.get_close_matches(spec.name, REGISTRY, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InvalidArgument(
            field="policy.name",
            value=spec.name,
            problem="there is no such policy",
            remedy=f"{hint}Known: {', '.join(sorted(REGISTRY))}.",
            reason="UNKNOWN_POLICY",
        )
    return factory(spec.settings, min_workers, max_workers)
