"""`schedule`: a time table of bounds, over any policy (`load_ratio+schedule`), or alone over the present count.

`schedule_table` has one line per entry, `days hh:mm-hh:mm min max`: days are `*`, a day (`mon`) or a range (`mon-fri`);
a time span may pass midnight; the first line that matches counts; where none does, the pool's bounds do. What the table
asks for is narrowed to the pool's bounds. A higher lower bound is answered ahead, by the pool's measured start-up time.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.forecast import start_up_s
from controlplane.core.policies.basis import as_settings, setting, values
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.wrapping import noted, raised
from controlplane.core.policy import Policy, PolicyAnswer, PolicyInputs

PREFIX = "schedule_"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_LINE = re.compile(r"(\S+)\s+(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})\s+(\d+)\s+(\d+)")
_DAY_S = 86_400
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday


@dataclass(frozen=True, slots=True)
class Entry:
    """`begin` and `end` in seconds of the day; `end` <= `begin` passes midnight."""

    days: frozenset[int]
    begin: int
    end: int
    least: int
    most: int

    def holds(self, weekday: int, second: float) -> bool:
        if self.begin < self.end:
            return weekday in self.days and self.begin <= second < self.end
        return (weekday in self.days and second >= self.begin) or ((weekday - 1) % 7 in self.days and second < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Settings have the prefix `schedule_`. `utc_offset_s`: what the table's clock is ahead of UTC."""

    table: str = setting("", "Lines `days hh:mm-hh:mm min max`; the first that matches counts.")
    utc_offset_s: float = setting(0.0, "What the table's clock is ahead of UTC, seconds.")
    lead_s: float = setting(
        0.0, "How early a higher lower bound is answered, seconds; 0: the pool's measured start-up.", at_least=0
    )

    @classmethod
    def read(cls, reader: Reader) -> "Schedule":
        """Raises InvalidArgument that names the line."""
        modifier = cls(**values(cls, reader, PREFIX))
        parse_table(reader, modifier.table)
        return modifier

    @property
    def settings(self) -> Mapping[str, object]:
        return as_settings(self, PREFIX)

    def bound(self, inputs: PolicyInputs) -> PolicyInputs:
        least, most, _ = self._bounds(inputs)
        return dataclasses.replace(inputs, min_workers=least, max_workers=most)

    def modify(self, answer: PolicyAnswer, inputs: PolicyInputs, policy: Policy) -> PolicyAnswer:
        least, most, until = self._bounds(inputs)
        again = until if answer.look_again_at is None else min(until, answer.look_again_at)
        count = min(max(answer.wanted, least), most)
        note = f"the table allows {least} to {most} now"
        if count == answer.wanted:
            return dataclasses.replace(noted(answer, "schedule", note), look_again_at=again)
        return raised(answer, "schedule", count, "SCHEDULE", note, again=again)

    def _bounds(self, inputs: PolicyInputs) -> tuple[int, int, float]:
        """(least, most, when to look again). The least of now and of one start-up later."""
        lead = start_up_s(inputs.start_ups_s, self.lead_s)
        entries = parse_table(Reader("schedule", {}), self.table)
        now = self._entry(entries, inputs.now)
        soon = self._entry(entries, inputs.now + lead)
        leasts = [entry.least for entry in (now, soon) if entry is not None]
        most = inputs.max_workers if now is None else min(now.most, inputs.max_workers)
        if soon is not None and soon.least > most:
            most = min(soon.most, inputs.max_workers)
        most = max(most, inputs.min_workers)
        least = min(max([inputs.min_workers, *leasts]), most)
        return least, most, inputs.now + 60.0 - (inputs.now + lead) % 60.0

    def _entry(self, entries: list[Entry], at: float) -> Entry | None:
        local = at + self.utc_offset_s
        weekday = (int(local // _DAY_S) + _EPOCH_WEEKDAY) % 7
        return next((entry for entry in entries if entry.holds(weekday, local % _DAY_S)), None)


def parse_table(reader: Reader, table: str) -> list[Entry]:
    """Raises InvalidArgument that names the line."""
    entries: list[Entry] = []
    for number, raw in enumerate(table.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise _bad(reader, number, f"{line!r} is no entry")
        days = _days(found[1])
        hours = [int(found[i]) for i in (2, 4)]
        minutes = [int(found[i]) for i in (3, 5)]
        if days is None:
            raise _bad(reader, number, f"{found[1]!r} is no day")
        if any(minute > 59 for minute in minutes) or any(
            h * 60 + m > 1440 for h, m in zip(hours, minutes, strict=True)
        ):
            raise _bad(reader, number, f"{line!r} has no time of day")
        least, most = int(found[6]), int(found[7])
        if least > most:
            raise _bad(reader, number, f"its least ({least}) is above its most ({most})")
        begin, end = (h * 3600 + m * 60 for h, m in zip(hours, minutes, strict=True))
        entries.append(Entry(days, begin, end, least, most))
    if not entries:
        raise _bad(reader, 1, "there is no entry")
    return entries


def _days(text: str) -> frozenset[int] | None:
    if text == "*":
        return frozenset(range(7))
    first, _, last = text.partition("-")
    if first not in DAYS or (last or first) not in DAYS:
        return None
    begin, end = DAYS.index(first), DAYS.index(last or first)
    return frozenset((begin + i) % 7 for i in range((end - begin) % 7 + 1))


def _bad(reader: Reader, number: int, problem: str) -> Exception:
    remedy = 'One line per entry: days hh:mm-hh:mm min max, e.g. "mon-fri 08:00-20:00 2 8".'
    return reader.bad(f"{PREFIX}table", f"line {number}: {problem}", remedy)
