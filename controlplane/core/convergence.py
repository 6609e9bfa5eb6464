"""One pool at a time: where it should be, and the steps that bring it there.

`desired_workers` is what STARTING + ACTIVE workers converge to. It comes from, in this order: deletion, an operator's
pin, the policy (unless scaling is on hold); the bounds always apply. Growing cancels drains, then retries failed
records, then starts stopped or new ones. Shrinking takes victims. A worker whose node announced its end does not
count any more: its replacement starts elsewhere first where there is room and time, so for that overlap STARTING +
ACTIVE may exceed the bounds by the workers that leave.
"""

from controlplane.core.aims import Moves, aim_of, expire_hold, staying
from controlplane.core.draft import Draft
from controlplane.core.forgetting import delete_when_empty, forget
from controlplane.core.leaving import leave_nodes
from controlplane.core.outcomes import departed, set_conditions, write_down
from controlplane.core.returns import settle_lost
from controlplane.core.scaling import grow, shrink
from controlplane.core.shares import preference
from controlplane.core.sleepers import keep_spares


def converge_pools(draft: Draft) -> None:
    for name in sorted(draft.pools):
        if draft.full:
            return
        _converge(draft, name)


def _converge(draft: Draft, name: str) -> None:
    pool = expire_hold(draft, draft.pools[name])
    before = len(staying(draft, pool))
    aim = aim_of(draft, pool, before)
    was_desired = pool.intent.desired_workers
    if aim.target != was_desired:
        pool = draft.pool_intent(pool, desired_workers=aim.target)
    moves = Moves(departed=departed(draft, pool))
    if aim.asked is not None and aim.asked.answer.shares:
        draft.preferences[name] = preference(draft, pool, aim.asked.answer.shares, lambda: staying(draft, pool))
    settle_lost(draft, pool, aim, moves)
    grow(draft, pool, aim, moves, policy_grows=aim.asked is not None and aim.asked.answer.wanted > before)
    shrink(draft, pool, aim, moves)
    leave_nodes(draft, pool, aim.target)
    write_down(draft, draft.pools[name], aim, moves, before, was_desired)
    no_spare = keep_spares(draft, draft.pools[name]) if moves.blocked is None else None
    set_conditions(draft, draft.pools[name], moves, no_spare)
    if pool.intent.deleting:
        delete_when_empty(draft, draft.pools[name])
    else:
        forget(draft, draft.pools[name])
