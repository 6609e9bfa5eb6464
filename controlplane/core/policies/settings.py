"""Reading a policy's settings: types, ranges and unknown keys, each error with field, value and remedy."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from springtide.errors import InvalidArgument
from springtide.model.pool import Setting

PREFIX = "policy.settings"


@dataclass(frozen=True, slots=True)
class Reader:
    """One policy's raw settings. Numbers may arrive as floats (the wire knows no integers)."""

    policy: str
    raw: Mapping[str, Setting]

    def reject_unknown(self, known: Iterable[str]) -> None:
        names = sorted(known)
        for key, value in self.raw.items():
            if key in names:
                continue
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise InvalidArgument(
                field=f"{PREFIX}.{key}",
                value=value,
                problem=f"the policy {self.policy} has no such setting",
                remedy=f"{hint}Its settings: {', '.join(names) or 'none'}.",
                reason="UNKNOWN_SETTING",
            )

    def number(self, key: str, default: float, *, above: float | None = None, at_least: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise self.bad(key, "it is no number", f"Give a number, e.g. {default}.")
        if above is not None and value <= above:
            raise self.bad(key, f"it must be greater than {above:g}", f"Give a number > {above:g}, e.g. {default}.")
        if at_least is not None and value < at_least:
            raise self.bad(key, f"it must be at least {at_least:g}", f"Give a number >= {at_least:g}, e.g. {default}.")
        return float(value)

    def integer(self, key: str, default: int | None, *, at_least: int) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return default
        example = default if default is not None else at_least
        if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
            raise self.bad(key, "it is no whole number", f"Give a whole number, e.g. {example}.")
        if value < at_least:
            raise self.bad(
                key, f"it must be at least {at_least}", f"Give a whole number >= {at_least}, e.g. {example}."
            )
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "it is neither true nor false", "Give true or false.")
        return value

    def choice(self, key: str, default: str, known: Sequence[str]) -> str:
        value = self.raw.get(key)
        if value is None:
            return default
        if value not in known:
            raise self.bad(key, "it is none of the known words", f"Give one of {', '.join(known)}.")
        return str(value)

    def text(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, "it is no text", "Give it in quotes.")
        return value

    def bad(self, key: str, problem: str, remedy: str) -> InvalidArgument:
        return InvalidArgument(field=f"{PREFIX}.{key}", value=self.raw.get(key), problem=problem, remedy=remedy)


def check_bounds(reader: Reader, min_workers: int, max_workers: int) -> None:
    """min_workers and max_workers among the settings mean the pool's bounds: they may repeat them, not contradict
    them."""
    for key, bound in (("min_workers", min_workers), ("max_workers", max_workers)):
        value = reader.integer(key, None, at_least=0)
        if value is not None and value != bound:
            raise reader.bad(
                key,
                f"the pool's {key} is {bound}; both mean the same bound",
                f"Give it once: as the pool's {key}, or here.",
            )
