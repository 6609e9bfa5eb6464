"""Each pool's routing policy, with the memory that it has gathered."""

from collections.abc import Container

from router.core.policies import make_policy
from router.core.policies.policy import Policy
from springtide.model.pool import RoutingSpec

_DEFAULT = RoutingSpec()


class PolicyBook:
    def __init__(self) -> None:
        self._policies: dict[str, tuple[RoutingSpec, Policy]] = {}

    def of(self, pool: str, spec: RoutingSpec = _DEFAULT) -> Policy:
        """The pool's; a new one, that remembers nothing, when its spec has changed."""
        known = self._policies.get(pool)
        if known is None or (known[0] is not spec and known[0] != spec):
            known = self._policies[pool] = (spec, make_policy(spec))
        return known[1]

    def keep(self, pools: Container[str]) -> None:
        """Forgets those of other pools."""
        for name in [name for name in self._policies if name not in pools]:
            del self._policies[name]
