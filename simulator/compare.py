"""Springtide's default policy against other projects' algorithms: same traces, engines, start-up times and bounds."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from controlplane.core.policies import RECOMMENDED
from simulator import load as loads
from simulator.load import DEFAULT_KIND, Arrival
from simulator.peers import PEERS, register_peers
from simulator.replay import Fleet, Scenario, one_pool, replay
from simulator.results import Slo, summarize
from simulator.world import Route
from springtide.errors import InvalidArgument
from springtide.model.pool import PolicySpec

BURST_FACTOR = 10.0
LOADS = ("code", "conv", "code-burst")
START_UPS_S = (20.0, 120.0)
_TAIL_S = 300.0  # counted after the last arrival: who does not shrink pays for it


@dataclass(frozen=True, slots=True)
class Case:
    """One load and one start-up time; the same fleet and bounds for every policy."""

    load: str  # code, conv, or code-burst
    start_up_s: float
    min_workers: int = 1
    max_workers: int = 16

    @property
    def title(self) -> str:
        names = {"code": "code trace", "conv": "conv trace", "code-burst": f"code trace, bursts x{BURST_FACTOR:g}"}
        return f"{names[self.load]}, start-up {self.start_up_s:g} s, {self.min_workers} to {self.max_workers} workers"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one case."""

    policy: str
    attainment: float
    worker_seconds: float
    scale_events: int
    flaps: int
    ttft_p99_s: float
    failed: int

    def beats(self, other: "Row") -> bool:
        """Fewer worker-seconds and higher attainment, both."""
        return self.worker_seconds < other.worker_seconds and self.attainment > other.attainment


def cases(names: Sequence[str] = LOADS, start_ups_s: Sequence[float] = START_UPS_S) -> list[Case]:
    """The six of the comparison, or some of them."""
    unknown = sorted(set(names) - set(LOADS))
    if unknown:
        remedy = f"Loads: {', '.join(LOADS)}."
        raise InvalidArgument(field="loads", value=",".join(unknown), problem="is no load here", remedy=remedy)
    return [
        Case(name, start_up_s, max_workers=64 if name == "code-burst" else 16)
        for name in names
        for start_up_s in start_ups_s
    ]


def arrivals(load: str, traces: Path, length_s: float | None = None) -> list[Arrival]:
    """The load of a case, or its first `length_s`."""
    name = "conv" if load == "conv" else "code"
    trace = loads.cut(loads.read_trace(traces / f"AzureLLMInferenceTrace_{name}.csv"), 0.0, length_s)
    return loads.burst_times(trace, BURST_FACTOR) if load == "code-burst" else trace


def default_policy() -> PolicySpec:
    """What we recommend for pools with latency targets."""
    return RECOMMENDED


def run_case(case: Case, policy: PolicySpec, label: str, traces: Path, length_s: float | None = None) -> Row:
    """One replay."""
    register_peers()
    load = arrivals(case.load, traces, length_s)
    pool = one_pool(
        policy,
        min_workers=case.min_workers,
        max_workers=case.max_workers,
        initial_workers=min(4, case.max_workers),
    )
    world = replay(
        Scenario(
            pools=(pool,),
            routes={DEFAULT_KIND: Route(pool.name)},
            fleet=Fleet(nodes=-(-case.max_workers // 8), gpus=8, start_up_s=case.start_up_s),
            horizon_s=load[-1].at_s + _TAIL_S,
        ),
        load,
    )
    found = summarize(world, Slo())
    return Row(
        policy=label,
        attainment=found.slo_attainment,
        worker_seconds=found.worker_seconds,
        scale_events=found.scale_ups + found.scale_downs,
        flaps=found.flaps,
        ttft_p99_s=found.ttft_p99_s or 0.0,
        failed=found.failed,
    )


def contestants(ours: PolicySpec) -> list[tuple[str, PolicySpec]]:
    """Ours first, then the peers with their own defaults."""
    return [(f"springtide {ours.name}", ours), *((name, PolicySpec(name)) for name in PEERS)]


def compare(
    traces: Path,
    ours: PolicySpec,
    *,
    jobs: int = 1,
    length_s: float | None = None,
    chosen: Sequence[Case] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[Case, list[Row]]:
    """All policies in all cases."""
    wanted = [(case, policy, label) for case in chosen or cases() for label, policy in contestants(ours)]
    found: dict[Case, list[Row]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        futures = [
            (case, pool.submit(run_case, case, policy, label, traces, length_s)) for case, policy, label in wanted
        ]
        for case, future in futures:
            row = future.result()
            found.setdefault(case, []).append(row)
            tell(f"{case.title}: {row.policy}: {row.attainment:.1%}, {row.worker_seconds:.0f} worker-seconds")
    return found


def beaten_by(rows: Iterable[Row]) -> list[str]:
    """Who has both fewer worker-seconds and higher attainment than ours (the first row)."""
    ours, *others = rows
    return [row.policy for row in others if row.beats(ours)]


# ------------------------------------------------------------------ as text


def to_markdown(found: dict[Case, list[Row]]) -> str:
    """One table per case."""
    parts = []
    for case, rows in found.items():
        parts.append(f"### {case.title[0].upper()}{case.title[1:]}\n")
        parts.append("| policy | SLO attainment | worker-seconds | scale events | flaps | TTFT p99, s | failed |")
        parts.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for row in rows:
            front = not any(other.beats(row) for other in rows)
            name = f"**{row.policy}**" if row is rows[0] else row.policy
            parts.append(
                f"| {name}{' *' if front else ''} | {100 * row.attainment:.1f} % | {row.worker_seconds:,.0f} "
                f"| {row.scale_events} | {row.flaps} | {row.ttft_p99_s:.2f} | {row.failed} |"
            )
        losers = beaten_by(rows)
        parts.append(f"\nBeaten by {', '.join(losers)}.\n" if losers else "")
    return "\n".join(parts).rstrip() + "\n"


BEGIN, END = "<!-- begin: springtide simulate compare -->", "<!-- end -->"


def write_tables(path: Path, tables: str) -> None:
    """Puts the tables between the page's two marks; the text around them stays."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text.split(BEGIN, 1)[1]:
        remedy = f"Put {BEGIN} and {END} where the tables belong."
        raise InvalidArgument(field="write", value=str(path), problem="has no marks for the tables", remedy=remedy)
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
