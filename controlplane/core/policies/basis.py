"""What policies have in common: settings declared as dataclass fields, read with their ranges, and three of them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from controlplane.core.policies.settings import Reader, check_bounds
from controlplane.core.policy import PolicyInputs
from springtide.model.pool import Setting

_BOUNDS = ("min_workers", "max_workers")


def setting(
    default: Any,
    doc: str = "",
    *,
    above: float | None = None,
    at_least: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a policy's setting. The type of the default is the setting's: whole number, number,
    truth or text. `doc` goes into docs/configuration.md."""
    return field(default=default, metadata={"doc": doc, "above": above, "at_least": at_least, "choices": choices})


def values(cls: type[Any], reader: Reader, prefix: str = "") -> dict[str, Any]:
    """The settings of a dataclass, read under `prefix`. Raises InvalidArgument."""
    found: dict[str, Any] = {}
    for known in dataclasses.fields(cls):
        key, default, rules = f"{prefix}{known.name}", known.default, known.metadata
        if isinstance(default, bool):
            found[known.name] = reader.flag(key, default)
        elif isinstance(default, int):
            found[known.name] = reader.integer(key, default, at_least=int(rules.get("at_least") or 0))
        elif isinstance(default, float):
            found[known.name] = reader.number(key, default, above=rules.get("above"), at_least=rules.get("at_least"))
        elif rules.get("choices"):
            found[known.name] = reader.choice(key, str(default), rules["choices"])
        else:
            found[known.name] = reader.text(key, str(default))
    return found


def as_settings(policy: Any, prefix: str = "") -> dict[str, object]:
    """What `values` reads: every setting under its name, with defaults filled in."""
    return {f"{prefix}{known.name}": getattr(policy, known.name) for known in dataclasses.fields(policy)}


class Declared:
    """What the control plane asks of any policy, answered from fields of the documents' names."""

    __slots__ = ()

    title: ClassVar[str] = ""
    requests_per_worker_capacity: int
    monitoring_interval: float
    drain_timeout: float

    @property
    def name(self) -> str:
        return self.title

    @property
    def monitoring_interval_s(self) -> float:
        return self.monitoring_interval

    @property
    def capacity(self) -> int:
        return self.requests_per_worker_capacity

    @property
    def drain_timeout_s(self) -> float:
        return self.drain_timeout

    @property
    def settings(self) -> Mapping[str, object]:
        return as_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis(Declared):
    """Base of policies whose settings are all declared with `setting`. Times in seconds, capacity in requests."""

    requests_per_worker_capacity: int = setting(8, "Requests that one worker serves well at a time.", at_least=1)
    monitoring_interval: float = setting(5.0, "Between two decisions, seconds.", above=0)
    drain_timeout: float = setting(30.0, "For the running requests of a worker that leaves, seconds.", above=0)

    @classmethod
    def read(cls, raw: Mapping[str, Setting], min_workers: int, max_workers: int) -> Self:
        """Raises InvalidArgument for an unknown key, a value out of range, or values that contradict one another."""
        reader = Reader(cls.title, raw)
        reader.reject_unknown([known.name for known in dataclasses.fields(cls)] + list(_BOUNDS))
        check_bounds(reader, min_workers, max_workers)
        policy = cls(**values(cls, reader))
        policy.check(reader)
        return policy

    def check(self, reader: Reader) -> None:
        """What settings may not be together. Raises InvalidArgument."""


def check_gap(reader: Reader, lower: str, low: float, upper: str, high: float) -> None:
    """Thresholds that cross would grow and shrink by turns. Raises InvalidArgument."""
    if low >= high:
        raise reader.bad(lower, f"it must be below {upper} ({high:g})", f"Leave a gap between {lower} and {upper}.")


def known_load(inputs: PolicyInputs) -> int:
    """The load, or the part of it that is known."""
    return inputs.at_least if inputs.load is None else inputs.load
