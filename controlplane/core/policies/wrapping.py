"""Policies that stand around another one: a floor, a time table, stages. Each passes on what it does not change."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs, Step


class Modifier(Protocol):
    """Changes a policy's answer."""

    @property
    def settings(self) -> Mapping[str, object]:
        """With their prefix."""
        ...

    def bound(self, inputs: PolicyInputs) -> PolicyInputs:
        """The inputs as the policy inside shall see them."""
        ...

    def modify(self, answer: PolicyAnswer, inputs: PolicyInputs, policy: Policy) -> PolicyAnswer: ...


@dataclass(frozen=True, slots=True)
class Wrapped:
    """`inner` with one modifier around it. `name` is the composed one, e.g. slo+predictive."""

    inner: Policy
    modifier: Modifier
    name: str

    @property
    def monitoring_interval_s(self) -> float:
        return self.inner.monitoring_interval_s

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def drain_timeout_s(self) -> float:
        return self.inner.drain_timeout_s

    @property
    def settings(self) -> Mapping[str, object]:
        return {**self.inner.settings, **self.modifier.settings}

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        answer = self.inner.decide(self.modifier.bound(inputs))
        return self.modifier.modify(answer, inputs, self.inner)


def innermost(policy: Policy) -> Policy:
    """The policy without what stands around it."""
    while isinstance(policy, Wrapped):
        policy = policy.inner
    return policy


def raised(answer: PolicyAnswer, stage: str, count: int, reason: str, note: str, **more: Any) -> PolicyAnswer:
    """The answer at another count, with what the stage says."""
    return dataclasses.replace(
        answer,
        wanted=count,
        reason=reason,
        message=f"{answer.message}; {note}",
        look_again_at=more.get("again", answer.look_again_at),
        trail=(*answer.trail, Step(stage, answer.wanted, count, note)),
    )


def noted(answer: PolicyAnswer, stage: str, note: str) -> PolicyAnswer:
    """The same answer; the stage has looked."""
    return dataclasses.replace(answer, trail=(*answer.trail, Step(stage, answer.wanted, answer.wanted, note)))
