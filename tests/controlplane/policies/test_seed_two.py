"""The tables of the second document (PL5, PL6), today's declarative form and the documented stepwise one."""

from dataclasses import dataclass

import pytest

from controlplane.core.policies.capability import Capability, pending_of
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.waterfall import Waterfall, parse_rules
from controlplane.core.policy import Demand, Supply
from controlplane.core.snapshot import PoolDemand
from springtide.model.enums import State
from springtide.model.pool import PolicySpec
from tests.controlplane.core.world import FakeNode, World
from tests.controlplane.policies.given import inputs, needs, policy, supply

MANY = 10**6


@pytest.mark.parametrize(
    ("tasks", "workers", "most", "wanted"),
    [
        (0, 0, 10, 0),
        (5, 0, 10, 1),
        (20, 1, 10, 2),
        (0, 3, 10, 0),
        (5, 10, 10, 1),
        (50, 2, 2, 2),
        (15, 5, 10, 5),
        (100, 10, 10, 10),
        (200, 1, MANY, 2),
    ],
)
def test_vanilla_declarative(tasks: int, workers: int, most: int, wanted: int) -> None:
    """PL5, seed 2 §3.4 HEAD: vanilla."""
    assert policy("vanilla", 0, most).decide(inputs(tasks, workers, most=most)).wanted == wanted


def test_vanilla_counts_what_is_coming() -> None:
    """PL4: during a boot nothing is started again."""
    answer = policy("vanilla").decide(inputs(100, 1, starting=1))
    assert (answer.wanted, answer.trail[-1].stage) == (2, "pending")
    assert policy("vanilla").decide(inputs(100, 0, starting=1)).reason == "STARTING"


@pytest.mark.parametrize(
    ("tasks", "workers", "wanted"),
    [(1, 0, 1), (11, 1, 2), (10, 1, 1), (200, 1, 2), (3, 4, 3), (4, 4, 4), (0, 4, 3), (0, 1, 0), (1, 2, 1)],
)
def test_vanilla_documented(tasks: int, workers: int, wanted: int) -> None:
    """PL5, seed 2 §2.05: above 10 one more, below 1 one less, both strict."""
    assert policy("vanilla", rule="step").decide(inputs(tasks, workers)).wanted == wanted


@dataclass(frozen=True)
class CapabilityRow:
    """One row: demands, present workers, cap, workers wanted per set."""

    name: str
    demands: tuple[Demand, ...]
    supplies: tuple[Supply, ...]
    most: int
    parts: dict[str, int]


CAPABILITY = (
    CapabilityRow("nothing to do: an empty list", (), (supply("a", "gpu", active=3),), 10, {}),
    CapabilityRow("20 gpu", (needs("gpu", tasks=20),), (), MANY, {"gpu": 4}),
    CapabilityRow("50 gpu, at most 3", (needs("gpu", tasks=50),), (), 3, {"gpu": 10}),
    CapabilityRow("50 gpu, 10 there", (needs("gpu", tasks=50),), (supply("a", "gpu", active=10),), 10, {"gpu": 10}),
    CapabilityRow("1 gpu + 1 tpu", (needs("gpu", tasks=1), needs("tpu", tasks=1)), (), MANY, {"gpu": 1, "tpu": 1}),
)


@pytest.mark.parametrize("row", CAPABILITY, ids=lambda row: row.name)
def test_capability_declarative(row: CapabilityRow) -> None:
    """PL5, PL6, seed 2 §3.4 HEAD: capability. The cap is the pool's."""
    present = sum(s.active for s in row.supplies)
    load = sum(demand.tasks for demand in row.demands)
    answer = policy("capability", 0, row.most).decide(
        inputs(load, present, most=row.most, demands=row.demands, supplies=row.supplies)
    )
    assert answer.parts == row.parts
    assert answer.wanted == min(sum(row.parts.values()), row.most)


GPU1 = (supply("a", "gpu", active=1),)
STEPS = (
    ("a: 1 gpu task, no worker: one start", (needs("gpu", tasks=1),), (supply("a", "gpu"),), +1),
    ("b: a capable worker and 1 task: none", (needs("gpu", tasks=1),), GPU1, 0),
    ("c: 15 gpu tasks, 1 worker: one start", (needs("gpu", tasks=15),), GPU1, +1),
    ("d: gpu and tpu: two starts", (needs("gpu", tasks=1), needs("tpu", tasks=1)), (), +2),
    ("e: {gpu,cpu} serves {gpu}", (needs("gpu", tasks=1),), (supply("a", "gpu", "cpu", active=1),), 0),
    ("f: a task that needs nothing, no worker", (needs(tasks=1),), (), +1),
    ("g: known but not yet connected: no second", (needs("gpu", tasks=15),), (supply("a", "gpu", starting=1),), 0),
    ("last capable stays", (needs("gpu", tasks=1),), (supply("a", "gpu", active=1), supply("b", active=3)), -1),
    ("no stop in a decision that starts", (needs("gpu", tasks=1),), (supply("b", active=3),), +1),
    ("what remains would be above upper", (needs(tasks=1),), (supply("a", active=3),), -1),
    ("idle gpu goes, cpu untouched", (needs(tasks=9),), (supply("c", active=3), supply("g", "gpu", active=99)), -1),
)


@pytest.mark.parametrize(("name", "demands", "supplies", "change"), STEPS, ids=[row[0] for row in STEPS])
def test_capability_documented(
    name: str, demands: tuple[Demand, ...], supplies: tuple[Supply, ...], change: int
) -> None:
    """PL6, seed 2 §3.4 document version: subset match, one start per set, last-capable guard, independence."""
    assert Capability(rule="step").step(demands, supplies)[0] == change


def test_sets_are_independent_and_no_task_counts_twice() -> None:
    """PL5, PL6: a worker counts for one set only, and an idle set goes without touching the other."""
    there = (supply("cpu", "cpu", active=20), supply("gpu", "gpu", active=10))
    busy = policy("capability", 0, 100).decide(
        inputs(150, 30, most=100, demands=(needs("cpu", tasks=100), needs("gpu", tasks=50)), supplies=there)
    )
    assert (busy.wanted, busy.parts) == (30, {"cpu": 20, "gpu": 10})
    done = policy("capability", 0, 100).decide(
        inputs(100, 30, most=100, demands=(needs("cpu", tasks=100), needs("gpu", tasks=0)), supplies=there)
    )
    assert (done.wanted, done.parts) == (20, {"cpu": 20})
    shared = policy("capability", 0, 100).decide(
        inputs(60, 10, most=100, demands=(needs(tasks=50), needs("gpu", tasks=10)), supplies=(there[1],))
    )
    assert shared.parts == {"gpu": 2, "": 10}


def test_a_set_that_nobody_offers_is_told_and_never_started() -> None:
    """PL6: it is said, and asks for no worker that could not serve it."""
    answer = policy("capability").decide(
        inputs(5, 1, demands=(needs("tpu", tasks=5),), supplies=(supply("a", "gpu", active=1),))
    )
    assert answer.wanted == 1, answer
    assert "nobody offers" in answer.message


@pytest.mark.parametrize(
    ("desired", "connected", "offers", "pending"),
    [({"": 5}, 2, (), 3), ({"": 2}, 5, (), 0), ({"gpu": 4, "tpu": 9}, 1, ("gpu",), 3), ({"gpu": 4}, 0, (), 0)],
)
def test_pending(desired: dict[str, int], connected: int, offers: tuple[str, ...], pending: int) -> None:
    """CP3, seed 2 §3.4: desired minus connected, never below 0, only sets that can be served."""
    assert pending_of(desired, connected, frozenset(offers)) == pending


@dataclass(frozen=True)
class Fall:
    """One row of the waterfall table."""

    name: str
    rules: str
    demands: tuple[Demand, ...]
    supplies: tuple[Supply, ...]
    parts: dict[tuple[str, str], int]


FALLS = (
    Fall("5", "1,a,10\n2,b,20", (needs(tasks=5),), (supply("a"), supply("b")), {("a", ""): 1, ("b", ""): 0}),
    Fall(
        "150, a is full",
        "1,a,10\n2,b,20",
        (needs(tasks=150),),
        (supply("a", active=10), supply("b")),
        {("a", ""): 10, ("b", ""): 5},
    ),
    Fall("a is away", "1,a,10\n2,b,20", (needs(tasks=5),), (supply("a", online=False), supply("b")), {("b", ""): 1}),
    Fall("rule 20, holds 3", "1,a,20", (needs(tasks=50),), (supply("a", active=3, most=3),), {("a", ""): 3}),
    Fall(
        "same priority: the first line first",
        "1,a,10\n1,b,10",
        (needs(tasks=100),),
        (supply("a"), supply("b")),
        {("a", ""): 10, ("b", ""): 0},
    ),
    Fall(
        "no task: a holds until b is empty",
        "1,a,10\n2,b,10",
        (),
        (supply("a", active=3), supply("b", active=2)),
        {("a", ""): 3, ("b", ""): 0},
    ),
    Fall(
        "no task, b away: a is emptied",
        "1,a,10\n2,b,10",
        (),
        (supply("a", active=3), supply("b", active=2, online=False)),
        {("a", ""): 0},
    ),
    Fall(
        "gpu: a 2, the rest to b",
        "1,a,2\n2,b,10",
        (needs("gpu", tasks=50),),
        (supply("a", "gpu", active=2), supply("b", "gpu")),
        {("a", ""): 0, ("b", ""): 0, ("a", "gpu"): 2, ("b", "gpu"): 3},
    ),
    Fall(
        "keys go only where they are offered",
        "1,a,10\n2,b,10",
        (needs("gpu", tasks=50),),
        (supply("a"), supply("b", "gpu")),
        {("a", ""): 0, ("b", ""): 0, ("b", "gpu"): 5},
    ),
    Fall("5 tasks, a has 10", "1,a,20", (needs(tasks=5),), (supply("a", active=10, most=20),), {("a", ""): 1}),
    Fall("in no rule: nothing", "1,a", (needs(tasks=5),), (supply("x"), supply("a")), {("a", ""): 1}),
)


@pytest.mark.parametrize("row", FALLS, ids=lambda row: row.name)
def test_waterfall(row: Fall) -> None:
    """PL5, seed 2 §3.4 HEAD: waterfall; the demand is spread once over all provisioners."""
    found = parse_rules(Reader("waterfall", {"rules": row.rules}))
    assert Waterfall(rules=row.rules).share(found, row.demands, row.supplies) == row.parts
    present = sum(s.present for s in row.supplies)
    tasks = sum(demand.tasks for demand in row.demands)
    answer = policy("waterfall", 0, 100, rules=row.rules).decide(
        inputs(tasks, present, most=100, demands=row.demands, supplies=row.supplies)
    )
    assert answer.wanted == sum(row.parts.values())


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("1", "line 1: '1' has 1 fields"),
        ("1,a\n2,b,3,4", "line 2"),
        ("# all\none,a", "line 2: 'one' in 'one,a' is no whole number"),
        ("1,a,many", "'many'"),
        ("1,", "names no provisioner"),
        ("1,a\n2,a", "line 2: the provisioner a has a rule already"),
        ("# nothing", "there is no rule"),
        ("1,a,-1", "is negative"),
    ],
)
def test_waterfall_rules_that_are_none(rules: str, told: str) -> None:
    """Issue, bad input: the line is named, and what a line looks like."""
    with pytest.raises(Exception, match="rules") as caught:
        policy("waterfall", rules=rules)
    assert told in str(caught.value)
    assert "priority,provisioner[,most]" in str(caught.value)


def test_waterfall_comments_and_spaces() -> None:
    """PL5: `#` begins a comment."""
    found = parse_rules(Reader("waterfall", {"rules": "# first\n 1 , a , 10 # ours\n\n2,b"}))
    assert [(rule.priority, rule.provisioner, rule.most) for rule in found] == [(1, "a", 10), (2, "b", None)]


@pytest.mark.parametrize(
    ("name", "tasks", "supplies", "parts"),
    [
        ("primary starts without a task", 0, (supply("p", most=1), supply("s", most=4)), {"pinned": 1, "burst": 0}),
        ("primary never stops", 0, (supply("p", most=1, active=1), supply("s", most=4)), {"pinned": 1, "burst": 0}),
        ("burst", 11, (supply("p", most=1, active=1), supply("s", most=4)), {"pinned": 1, "burst": 1}),
        (
            "10 a worker is no burst",
            10,
            (supply("p", most=1, active=1), supply("s", most=4)),
            {"pinned": 1, "burst": 0},
        ),
        (
            "only burst stops",
            1,
            (supply("p", most=1, active=1), supply("s", most=4, active=2)),
            {"pinned": 1, "burst": 1},
        ),
        (
            "1 a worker stays",
            3,
            (supply("p", most=1, active=1), supply("s", most=4, active=2)),
            {"pinned": 1, "burst": 2},
        ),
        (
            "coming counts",
            90,
            (supply("p", most=1, active=1), supply("s", most=4, starting=1)),
            {"pinned": 1, "burst": 1},
        ),
        (
            "a lost primary is replaced",
            9,
            (supply("p", most=1), supply("s", most=4, active=1)),
            {"pinned": 1, "burst": 1},
        ),
    ],
)
def test_fixed_elastic(name: str, tasks: int, supplies: tuple[Supply, ...], parts: dict[str, int]) -> None:
    """PL5, seed 2 §2.12: the pinned tier is started once and never stopped; only the burst tier follows."""
    active, starting = sum(s.active for s in supplies), sum(s.starting for s in supplies)
    answer = policy("fixed_elastic").decide(inputs(tasks, active, starting=starting, supplies=supplies))
    assert answer.parts == parts
    assert answer.wanted == sum(parts.values())


def test_several_provisioners_answer_the_demand_once() -> None:
    """PL5: two nodes of two provisioners and one demand give one worker more, not two."""
    world = World(nodes=2, gpus=4)
    for node, provisioner in zip(world.nodes.values(), ("a", "b"), strict=True):
        node.labels["provisioner"] = provisioner
    world.add_pool(desired=1, policy=PolicySpec("vanilla"))
    world.turn(times=8)
    for worker in world.workers.values():
        world.engine(worker.worker_id).in_flight = 8
    world.demand["demo"] = PoolDemand(12)
    world.turn(times=30)
    grown = [d for d in world.decisions if d.policy == "vanilla" and d.workers]
    assert [d.to_workers - d.from_workers for d in grown[:1]] == [1]
    assert world.count(State.ACTIVE) == 2


def test_records_follow_starts_and_stops() -> None:
    """PL6, seed 2 §3.4 (h), (i): a start adds its worker with what it offers, a stop takes both away."""
    world = World(nodes=1, gpus=2)
    world.nodes["n1"].labels["zone"] = "x"
    world.add_pool(min_workers=0, desired=0, policy=PolicySpec("capability", {"rule": "step"}))
    world.turn(times=3)
    world.demand["demo"] = PoolDemand(1, by_needs={"gpu,zone": 1})
    world.turn(times=8)
    assert world.count(State.ACTIVE) == 1
    world.demand["demo"] = PoolDemand(0, by_needs={})
    world.turn(times=30)
    assert world.count(State.ACTIVE) == 0
    assert {d.reason for d in world.decisions if d.workers} == {"LOAD_ABOVE_THRESHOLD", "LOAD_BELOW_THRESHOLD"}


@pytest.mark.parametrize(
    ("desired", "there", "most", "starts", "stops"), [(3, 0, 8, 3, 0), (1, 3, 8, 0, 2), (2, 2, 8, 0, 0)]
)
def test_coordinator(desired: int, there: int, most: int, starts: int, stops: int) -> None:
    """PV1, seed 2 §3.4 coordinator: what lacks is started, what is too many is stopped, equal is nothing."""
    world = World(gpus=8)
    world.add_pool(min_workers=0, max_workers=most, desired=there, policy=PolicySpec("static"))
    world.turn(times=8)
    began, ended = world.actions().count("scale_up_start"), world.actions().count("scale_down_start")
    world.set_intent("demo", manual_workers=5)
    world.set_intent("demo", manual_workers=desired)  # two rapid orders, one reconciliation
    revision = world.revision
    world.turn(times=8)
    assert world.actions().count("scale_up_start") - began == starts
    assert world.actions().count("scale_down_start") - ended == stops
    if not starts and not stops:
        moved = [write for made in world.plans if made.writes for write in made.writes]
        assert world.count(State.ACTIVE) == there
        assert moved
        assert world.revision - revision <= 3


def test_a_provisioner_holds_what_its_nodes_hold() -> None:
    """PV1: the cap of a provisioner is the room on its nodes, in workers of this pool."""
    world = World(nodes=1, gpus=4)
    world.nodes["n2"] = FakeNode("n2", 2, labels={"provisioner": "burst"})
    world.add_pool(
        tensor_parallel_size=2, max_workers=8, policy=PolicySpec("waterfall", {"rules": "1,static\n2,burst"})
    )
    world.turn(times=8)
    world.demand["demo"] = PoolDemand(200)
    world.turn(times=12)
    assert world.decisions[-1].inputs["part_static"] == 2
    assert world.decisions[-1].inputs["part_burst"] == 1
    assert world.count(State.ACTIVE) == 3
