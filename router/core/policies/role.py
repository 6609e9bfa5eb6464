"""Which pool of a model serves a request: one model may have a pool for each role."""

from collections.abc import Mapping

from springtide.model.enums import Role

_WITHOUT_A_WISH = (Role.MIXED, Role.DECODE, Role.PREFILL)
"""A decode pool can compute a whole request, its prefill included; a prefill pool is the last resort."""


def pool_for(by_role: Mapping[Role, str], wanted: Role | None) -> str | None:
    """The pool's name; None where a wanted role has no pool. A mixed pool takes what asks for any role."""
    if wanted is not None:
        return by_role.get(wanted) or by_role.get(Role.MIXED)
    return next((by_role[role] for role in _WITHOUT_A_WISH if role in by_role), None)
