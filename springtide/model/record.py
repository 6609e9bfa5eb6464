"""Decisions and events: what is written down for people and for audits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide.model.enums import DecisionResult


@dataclass(frozen=True, slots=True)
class Decision:
    """One scaling decision. A standing one is recorded once: `count` and `last_at` grow.

    `decision_id` 0: not stored yet.
    """

    pool: str
    at: float
    policy: str
    result: DecisionResult
    from_workers: int
    to_workers: int
    reason: str
    message: str
    inputs: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    trace_id: str = ""
    decision_id: int = 0
    last_at: float = 0.0
    count: int = 1
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `action` and `status` use the fourth seed's names where it has one.

    `event_id` 0: not stored yet.
    """

    at: float
    action: str
    target: str
    status: str
    pool: str = ""
    node_id: str = ""
    reason: str = ""
    message: str = ""
    trace_id: str = ""
    event_id: int = 0
    revision: int = 0
