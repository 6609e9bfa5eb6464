"""`capability`: each set of needed capability keys scales by itself, on the workers that offer all of its keys.

A worker serves a set when it offers at least its keys; only names count. Sets are served the most specific first, each
from the workers that offer least beyond it, and a worker counts for one set only, so that no request is counted twice.
`declarative` asks for ceil(requests / upper) at once and keeps what is there while the ratio is not below `lower`.
`step` moves one worker per set and decision: starts first, and nothing is stopped in a decision that starts.
Where nobody tells requests apart, the whole load is one set that needs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.policies.basis import Basis, check_gap, known_load, setting
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.vanilla import RULES
from controlplane.core.policy import Demand, PolicyAnswer, PolicyInputs, Share, Supply
from controlplane.core.stages import Course, bounds, last_in_use, pending, signal_age


def label(needs: frozenset[str]) -> str:
    """A set of keys as one word: "gpu,high_memory"; "" for none."""
    return ",".join(sorted(needs))


def keys_of(text: str) -> frozenset[str]:
    """The set of keys of such a word."""
    return frozenset(filter(None, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability(Basis):
    """Ratios are requests per capable worker."""

    title: ClassVar[str] = "capability"

    upper_task_ratio: float = setting(
        5.0, "Requests of a set per worker that serves it, above which the set grows.", above=0
    )
    lower_task_ratio: float = setting(0.5, "Below which it shrinks.", at_least=0)
    rule: str = setting(
        "declarative",
        "`declarative`: what the requests need, at once; `step`: one worker per set and decision.",
        choices=RULES,
    )

    def check(self, reader: Reader) -> None:
        check_gap(reader, "lower_task_ratio", self.lower_task_ratio, "upper_task_ratio", self.upper_task_ratio)

    def decide(self, inputs: PolicyInputs) -> PolicyAnswer:
        demands, supplies = demands_in(inputs), supplies_in(inputs)
        lacking = 0
        if self.rule == "step":
            change, message = self.step(demands, supplies)
            parts: dict[str, int] = {}
            wanted = inputs.present + change
        else:
            parts, unmet, lacking = self.desired(demands, supplies)
            if lacking > max(0, inputs.max_workers - inputs.present):  # nobody keeps more than it needs
                parts, unmet, lacking = self.desired(demands, supplies, keep=False)
            wanted, note = _one_direction(sum(parts.values()), lacking, inputs)
            said = [f"{{{name}}} {count}" for name, count in parts.items()] or ["no request"]
            said += [f"{{{name}}} {count} that nobody offers" for name, count in unmet.items()]
            message = ", ".join(said) + note
        reason = "CAPABILITY_UNCHANGED"
        if wanted != inputs.present:
            reason = "LOAD_ABOVE_THRESHOLD" if wanted > inputs.present else "LOAD_BELOW_THRESHOLD"
        course = Course(inputs, wanted, reason, message)
        signal_age(course)
        pending(course)
        if not lacking:  # else those that are there may be of no use to what is
            last_in_use(course)
        bounds(course)
        shares = [Share(count, None, keys_of(name)) for name, count in parts.items()]
        return course.answer(parts, sorted(shares, key=lambda share: -len(share.needs)))

    def desired(
        self, demands: Sequence[Demand], supplies: Sequence[Supply], *, keep: bool = True
    ) -> tuple[dict[str, int], dict[str, int], int]:
        """(workers wanted per set that can be served, per set that nobody offers, how many of the wanted are not there
        and have room where they belong). Sets without requests are left out. `keep`: by the lower ratio, too."""
        left = [supply.present for supply in supplies]
        room = [math.inf if supply.most is None else supply.most - supply.present for supply in supplies]
        lacking = 0
        wanted: dict[str, int] = {}
        unmet: dict[str, int] = {}
        served: list[tuple[Demand, list[int]]] = []
        for demand in sorted(demands, key=lambda d: (-len(d.needs), label(d.needs))):
            if demand.tasks <= 0:
                continue
            need = max(1, math.ceil(demand.tasks / self.upper_task_ratio))
            capable = [i for i, supply in enumerate(supplies) if demand.needs <= supply.offers]
            if supplies and not capable:
                unmet[label(demand.needs)] = need
                continue
            wanted[label(demand.needs)] = need
            there = sorted((i for i in capable if supplies[i].present), key=lambda i: (len(supplies[i].offers), i))
            for index in there:
                taken = min(left[index], need)
                left[index] -= taken
                need -= taken
            for index in capable:
                taken = int(min(room[index], need))
                room[index] -= taken
                need -= taken
                lacking += taken
            served.append((demand, there))
        for demand, there in served if keep else ():
            self._keep(demand, there, supplies, left, wanted)
        return wanted, unmet, lacking

    def _keep(
        self, demand: Demand, there: list[int], supplies: Sequence[Supply], left: list[int], wanted: dict[str, int]
    ) -> None:
        """Workers closest to the set that no set needs stay while its ratio is not below the lower one."""
        name = label(demand.needs)
        closest = [i for i in there if len(supplies[i].offers) == len(supplies[there[0]].offers)]
        spare = sum(left[i] for i in closest)
        if spare and demand.tasks / (wanted[name] + spare) >= self.lower_task_ratio:
            wanted[name] += spare
            for index in closest:
                left[index] = 0

    def step(self, demands: Sequence[Demand], supplies: Sequence[Supply]) -> tuple[int, str]:
        """(workers more or fewer, sentence): one start per set that lacks workers, else one stop per idle group."""
        starts = [demand for demand in demands if demand.tasks > 0 and self._lacks(demand, supplies)]
        if starts:
            return len(starts), "starts one for " + ", ".join(f"{{{label(d.needs)}}}" for d in starts)
        stops = [supply for supply in supplies if supply.active > 0 and self._idle(supply, demands, supplies)]
        if stops:
            return -len(stops), "stops one of " + ", ".join(f"{{{label(s.offers)}}}" for s in stops)
        return 0, "every set has the workers it needs"

    def _lacks(self, demand: Demand, supplies: Sequence[Supply]) -> bool:
        capable = [supply for supply in supplies if demand.needs <= supply.offers]
        if any(supply.starting for supply in capable):
            return False
        active = sum(supply.active for supply in capable)
        return active == 0 or demand.tasks / active > self.upper_task_ratio

    def _idle(self, supply: Supply, demands: Sequence[Demand], supplies: Sequence[Supply]) -> bool:
        """Whether the group can spare one: neither the last able to serve what waits, nor to be started again."""
        served = [demand for demand in demands if demand.needs <= supply.offers and demand.tasks > 0]
        tasks = sum(demand.tasks for demand in served)
        if tasks / supply.active >= self.lower_task_ratio:
            return False
        for demand in served:
            rest = sum(other.active for other in supplies if demand.needs <= other.offers) - 1
            if rest == 0 or demand.tasks / rest > self.upper_task_ratio:
                return False
        return True


def _one_direction(wanted: int, lacking: int, inputs: PolicyInputs) -> tuple[int, str]:
    """(workers, what to say). Where one set lacks workers and another has too many, the sum would hide both: what lacks
    is started first, and what is too much stops in a later decision; or first, where the upper bound leaves no room."""
    spare = inputs.present + lacking - wanted
    if not lacking or spare <= 0:
        return wanted, ""
    room = inputs.max_workers - inputs.present
    if room > 0:
        return inputs.present + min(lacking, room), f"; {lacking} are not there, {spare} stop after that"
    return inputs.present - min(lacking, spare), f"; {lacking} are not there, {spare} make room first"


def demands_in(inputs: PolicyInputs) -> tuple[Demand, ...]:
    """What is asked for, by need; one set that needs nothing where nobody tells."""
    return inputs.demands or (Demand(frozenset(), known_load(inputs)),)


def supplies_in(inputs: PolicyInputs) -> tuple[Supply, ...]:
    """Who gives workers; without nodes that are known, those that are there offer nothing in particular."""
    if inputs.supplies:
        return inputs.supplies
    return (Supply("", frozenset(), inputs.active, inputs.starting),) if inputs.present else ()


def pending_of(desired: Mapping[str, int], connected: int, offers: frozenset[str]) -> int:
    """Workers that were asked for and are not connected yet, of the sets that `offers` can serve; never below 0."""
    asked = sum(count for name, count in desired.items() if keys_of(name) <= offers)
    return max(0, asked - connected)
