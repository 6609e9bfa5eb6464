"""Policies that are not ours: registered at start-up, and never trusted.

A plug-in is a factory `(settings, min_workers, max_workers) -> Policy`, the same object live and in simulation. What it
raises, or an answer that cannot be meant, holds its own pool with the reason POLICY_FAILED or POLICY_INVALID and
touches nobody else.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs
from springtide.errors import FailedPrecondition, InvalidArgument, SpringtideError
from springtide.model.pool import Setting

Factory = Callable[[Mapping[str, Setting], int, int], Policy]

PLUGINS: dict[str, Factory] = {}  # filled before the first plan, by those who may look around: see register


def register(name: str, factory: Factory) -> None:
    """Makes a policy known by name. Called at start-up only; a later registration of the same name replaces it."""
    PLUGINS[name] = factory


def broken(name: str, why: str) -> Factory:
    """A factory for a plug-in that could not be loaded: pools that name it hold and say why."""

    def refuse(raw: Mapping[str, Setting], min_workers: int, max_workers: int) -> Policy:
        raise InvalidArgument(
            field="policy.name",
            value=name,
            problem=f"the plug-in could not be loaded: {why}",
            remedy="Mend or remove the package that brings it.",
            reason="PLUGIN_BROKEN",
        )

    return refuse


@dataclass(frozen=True, slots=True)
class Guarded:
    """A plug-in's policy with its figures read and checked once."""

    inner: Policy
    name: str
    monitoring_interval_s: float
    capacity: int
    drain_timeout_s: float
    settings: Mapping[str, object]

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        """Raises FailedPrecondition for an answer that cannot be meant, and what the plug-in raises."""
        answer: object = self.inner.decide(inputs)  # what a plug-in says it answers is not taken for granted
        wanted = getattr(answer, "wanted", None)
        if (
            not isinstance(answer, PolicyAnswer)
            or isinstance(wanted, bool)
            or not isinstance(wanted, int)
            or wanted < 0
        ):
            raise FailedPrecondition(f"{self.name} answered {answer!r}, which is no count of workers")
        return answer


def guarded(name: str, factory: Factory, raw: Mapping[str, Setting], min_workers: int, max_workers: int) -> Guarded:
    """Raises InvalidArgument for whatever goes wrong."""
    try:
        inner = factory(raw, min_workers, max_workers)
        interval, drain = float(inner.monitoring_interval_s), float(inner.drain_timeout_s)
        capacity, settings = int(inner.capacity), dict(inner.settings)
    except SpringtideError:
        raise
    except Exception as error:
        raise _failed(name, f"{type(error).__name__}: {error}") from error
    if not (0 < interval < math.inf and 0 <= drain < math.inf and capacity >= 1):
        raise _failed(name, f"interval {interval}, drain timeout {drain} or capacity {capacity} cannot be meant")
    return Guarded(inner, name, interval, capacity, drain, settings)


def _failed(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        field="policy.name",
        value=name,
        problem=f"the plug-in failed: {why}",
        remedy="Mend the plug-in, or name another policy.",
        reason="PLUGIN_FAILED",
    )
