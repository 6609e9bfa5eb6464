"""Capacity weights for unlike workers: a need in standard workers becomes a count of the workers that there are."""

import math

from controlplane.core.policy import PolicyInputs


def weight_present(inputs: PolicyInputs) -> float:
    """Standard workers that STARTING and ACTIVE ones are worth."""
    known = sum(supply.present for supply in inputs.supplies)
    weighted = sum(supply.present * supply.weight for supply in inputs.supplies)
    return weighted + max(0, inputs.present - known)


def weight_active(inputs: PolicyInputs) -> float:
    """Standard workers that the ACTIVE ones are worth."""
    known = sum(supply.active for supply in inputs.supplies)
    weighted = sum(supply.active * supply.weight for supply in inputs.supplies)
    return weighted + max(0, inputs.active - known)


def workers_for(inputs: PolicyInputs, units: float) -> int:
    """How many workers hold `units`: added ones are those that the supplies still have room for, the heaviest first;
    removed ones are taken for the heaviest, so that what remains is surely enough."""
    present, worth = inputs.present, weight_present(inputs)
    if all(supply.weight == 1.0 for supply in inputs.supplies):
        return math.ceil(units - 1e-9)
    missing = units - worth
    if missing <= 0:
        heaviest = max((s.weight for s in inputs.supplies if s.present), default=1.0)
        return max(0, present - math.floor(-missing / heaviest + 1e-9))
    count = present
    for supply in sorted(inputs.supplies, key=lambda s: -s.weight):
        room = 10**6 if supply.most is None else supply.most - supply.present
        taken = min(max(room, 0), math.ceil(missing / supply.weight - 1e-9))
        count += taken
        missing -= taken * supply.weight
        if missing <= 1e-9:
            return count
    return count + math.ceil(missing)
