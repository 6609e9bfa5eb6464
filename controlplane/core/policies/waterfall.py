"""`waterfall`: provisioners are filled in the order of their priorities, each up to its cap.

`rules` has one line per provisioner, `priority,provisioner[,most]`; the smallest priority is filled first, `#` begins a
comment. The whole demand is spread once: no provisioner answers it for itself. A provisioner that is away, or in no
rule, gets nothing. Without requests a provisioner keeps its workers until those of later priority are empty. Sets of
needed capability keys go only where a provisioner offers them, and a request counts for one set only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, setting
from controlplane.core.policies.capability import demands_in, keys_of, label
from controlplane.core.policies.settings import Reader
from controlplane.core.policy import Demand, PolicyAnswer, PolicyInputs, Share, Supply
from controlplane.core.stages import Course, bounds, last_in_use, pending, signal_age


@dataclass(frozen=True, slots=True)
class Rule:
    """`most` None: as many as it can hold."""

    priority: int
    provisioner: str
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall(Basis):
    """`upper_task_ratio`: requests per worker that the whole is sized for."""

    title: ClassVar[str] = "waterfall"

    rules: str = setting("", "Lines `priority,provisioner[,most]`; `#` begins a comment.")
    upper_task_ratio: float = setting(10.0, "Requests per worker that the demand is divided by.", above=0)

    def check(self, reader: Reader) -> None:
        parse_rules(reader)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        rules = parse_rules(Reader(self.title, {"rules": self.rules}))
        parts = self.share(rules, demands_in(inputs), inputs.supplies)
        wanted = sum(parts.values())
        spread: dict[str, int] = {}
        for (provisioner, needs), count in parts.items():
            name = provisioner if not needs else f"{provisioner}:{needs}"
            spread[name] = spread.get(name, 0) + count
        said = ", ".join(f"{name} {count}" for name, count in spread.items()) or "nobody is there to give workers"
        if not any(supply.online for supply in inputs.supplies):
            course = Course(inputs, inputs.present, "NO_PROVISIONER", said)
        else:
            reason = "WATERFALL"
            course = Course(inputs, wanted, reason, said)
        signal_age(course)
        pending(course)
        last_in_use(course)
        bounds(course)
        shares = [Share(count, name, keys_of(needs)) for (name, needs), count in parts.items() if count]
        return course.answer(spread, sorted(shares, key=lambda share: -len(share.needs)))

    def share(
        self, rules: Sequence[Rule], demands: Sequence[Demand], supplies: Sequence[Supply]
    ) -> dict[tuple[str, str], int]:
        """Workers wanted by (provisioner, needed keys), for every provisioner that a rule names and that is there."""
        order = sorted(rules, key=lambda rule: rule.priority)  # stable: the first line wins a tie
        there = {rule.provisioner: _of(rule.provisioner, supplies) for rule in order}
        rooms = {rule.provisioner: _cap(rule, there[rule.provisioner]) for rule in order}
        wanted: dict[tuple[str, str], int] = {(name, ""): 0 for name, found in there.items() if _online(found)}
        asked = [demand for demand in demands if demand.tasks > 0]
        if not asked:
            return self._hold_from_below(order, there)
        for demand in sorted(asked, key=lambda d: (-len(d.needs), label(d.needs))):
            missing = max(1, math.ceil(demand.tasks / self.upper_task_ratio))
            for rule in order:
                found = [s for s in there[rule.provisioner] if s.online and demand.needs <= s.offers]
                taken = min(missing, rooms[rule.provisioner]) if found else 0
                if taken:
                    key = (rule.provisioner, label(demand.needs))
                    wanted[key] = wanted.get(key, 0) + taken
                    rooms[rule.provisioner] -= taken
                    missing -= taken
        return wanted

    @staticmethod
    def _hold_from_below(order: Sequence[Rule], there: Mapping[str, list[Supply]]) -> dict[tuple[str, str], int]:
        there = {name: found for name, found in there.items() if _online(found)}
        counts = {name: sum(supply.present for supply in found) for name, found in there.items()}
        wanted: dict[tuple[str, str], int] = {}
        for rule in order:
            if rule.provisioner in counts:
                later = sum(counts.get(other.provisioner, 0) for other in order if other.priority > rule.priority)
                wanted[(rule.provisioner, "")] = counts[rule.provisioner] if later else 0
        return wanted


def _of(provisioner: str, supplies: Sequence[Supply]) -> list[Supply]:
    return [supply for supply in supplies if supply.provisioner == provisioner]


def _online(supplies: Sequence[Supply]) -> bool:
    return any(supply.online for supply in supplies)


def _cap(rule: Rule, supplies: Sequence[Supply]) -> int:
    """What the rule allows and the provisioner can hold; 0 when it is away."""
    online = [supply for supply in supplies if supply.online]
    if not online:
        return 0
    holds = None if any(s.most is None for s in online) else sum(s.most or 0 for s in online)
    caps = [cap for cap in (rule.most, holds) if cap is not None]
    return max(0, min(caps, default=1 << 31))


def parse_rules(reader: Reader) -> list[Rule]:
    """Lines `priority,provisioner[,most]` of the setting `rules`. Raises InvalidArgument that names the line."""
    rules: list[Rule] = []
    for number, raw in enumerate(reader.text("rules", "").splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        fields = [part.strip() for part in line.split(",")]
        if len(fields) not in (2, 3):
            raise _bad(reader, number, f"{line!r} has {len(fields)} fields")
        name = fields[1]
        if not name:
            raise _bad(reader, number, f"{line!r} names no provisioner")
        if any(rule.provisioner == name for rule in rules):
            raise _bad(reader, number, f"the provisioner {name} has a rule already")
        numbers = [_whole(reader, number, line, text) for text in (fields[0], *fields[2:])]
        rules.append(Rule(numbers[0], name, numbers[1] if len(numbers) > 1 else None))
    if not rules:
        raise _bad(reader, 1, "there is no rule")
    return rules


def _whole(reader: Reader, number: int, line: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise _bad(reader, number, f"{text!r} in {line!r} is no whole number") from None
    if value < 0:
        raise _bad(reader, number, f"{text} in {line!r} is negative")
    return value


def _bad(reader: Reader, number: int, problem: str) -> Exception:
    return reader.bad("rules", f"line {number}: {problem}", "One line per provisioner: priority,provisioner[,most].")
