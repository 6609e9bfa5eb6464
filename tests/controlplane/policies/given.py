"""Inputs for policies, with what a test does not say filled in."""

from collections.abc import Iterable

from controlplane.core.policies import make_policy
from controlplane.core.policy import Demand, Policy, PolicyInputs, Supply
from controlplane.core.snapshot import LoadSample
from springtide.model.pool import PolicySpec, Setting

NOW = 1_000_000.0


def sample(age_s: float, load: int | None, active: int, starting: int = 0, **more: object) -> LoadSample:
    at_least = load or 0
    return LoadSample(NOW - age_s, load, 0, active, starting, at_least, **more)  # type: ignore[arg-type]


def steady(load: int | None, active: int, seconds: int = 120, **more: object) -> tuple[LoadSample, ...]:
    """The same load once per second."""
    return tuple(sample(float(age), load, active, 0, **more) for age in range(seconds, -1, -1))


def inputs(
    load: int | None = 0,
    active: int = 0,
    *,
    starting: int = 0,
    least: int = 0,
    most: int = 10,
    samples: Iterable[LoadSample] | None = None,
    **more: object,
) -> PolicyInputs:
    given: dict[str, object] = {
        "now": NOW,
        "min_workers": least,
        "max_workers": most,
        "active": active,
        "starting": starting,
        "draining": 0,
        "desired": active + starting,
        "in_flight": load,
        "waiting": 0,
        "samples": tuple(samples) if samples is not None else steady(load, active),
        "last_scale_up_at": None,
        "last_scale_down_at": None,
        "at_least": load or 0,
    }
    return PolicyInputs(**{**given, **more})  # type: ignore[arg-type]


def policy(name: str, least: int = 0, most: int = 10, /, **settings: Setting) -> Policy:
    return make_policy(PolicySpec(name, settings), least, most)


def needs(*keys: str, tasks: int) -> Demand:
    return Demand(frozenset(keys), tasks)


def supply(provisioner: str, *offers: str, active: int = 0, starting: int = 0, **more: object) -> Supply:
    return Supply(provisioner, frozenset(offers), active, starting, **more)  # type: ignore[arg-type]
