"""Routing policies by name. Each is one small module; springtide.model.routing_policy has their settings."""

from collections.abc import Callable, Mapping
from typing import Any

from router.core.policies.at_random import AtRandom
from router.core.policies.capabilities import Capabilities
from router.core.policies.kv_cost import KvCost
from router.core.policies.least_in_flight import LeastInFlight
from router.core.policies.least_kv import LeastKv
from router.core.policies.policy import Policy
from router.core.policies.power_of_two import PowerOfTwo
from router.core.policies.prefix_aware import PrefixAware
from router.core.policies.request_cost import RequestCost
from router.core.policies.round_robin import RoundRobin
from router.core.policies.sticky import Sticky
from router.core.policies.weighted import Weighted
from springtide.errors import InvalidArgument
from springtide.model.pool import RoutingSpec
from springtide.model.routing_policy import routing_settings

REGISTRY: Mapping[str, Callable[..., Policy]] = {
    "least_in_flight": LeastInFlight,
    "round_robin": RoundRobin,
    "random": AtRandom,
    "power_of_two": PowerOfTwo,
    "weighted": Weighted,
    "least_kv": LeastKv,
    "request_cost": RequestCost,
    "prefix_aware": PrefixAware,
    "kv_cost": KvCost,
    "sticky": Sticky,
    "capabilities": Capabilities,
}


def make_policy(spec: RoutingSpec) -> Policy:
    """What this version does not know, name or setting, is routed by the default: never fatal."""
    try:
        settings: dict[str, Any] = routing_settings(spec)
    except InvalidArgument:
        return LeastInFlight()
    return REGISTRY[spec.name](**settings)
