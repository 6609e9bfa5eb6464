"""Routing policies one by one (RT1, RT7, RT10, RT12, RT13; F8): distribution, bounds, gates; nobody ineligible."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.pick import meets, pick
from router.core.policies import REGISTRY, make_policy
from router.core.policies.kv_cost import KvCost
from router.core.policies.least_in_flight import LeastInFlight
from router.core.policies.least_kv import estimated_kv
from router.core.policies.prefix_aware import PrefixAware
from router.core.policies.prefix_index import PrefixIndex
from router.core.policies.role import pool_for
from router.core.policies.sticky import Sticky
from router.core.policies.weight_version import order
from router.core.seat import Seat
from router.core.want import Needs, Want
from springtide.model.enums import Role
from springtide.model.pool import RoutingSpec
from springtide.model.routing_policy import ROUTING_POLICIES
from tests.routing.world import Sender, policy, prompt, seats_of, worker

NAMES = sorted(ROUTING_POLICIES)


def test_each_policy_has_its_settings_and_each_setting_its_policy() -> None:
    assert set(REGISTRY) == set(ROUTING_POLICIES)
    for name in NAMES:
        assert type(make_policy(RoutingSpec(name))) is REGISTRY[name]


@pytest.mark.parametrize("spec", [RoutingSpec("of_a_later_version"), RoutingSpec("sticky", {"later": 1})])
def test_what_this_version_does_not_know_is_routed_by_the_default(spec: RoutingSpec) -> None:
    assert isinstance(make_policy(spec), LeastInFlight)


STATES = st.fixed_dictionaries(
    {
        "own": st.integers(0, 5),
        "others": st.integers(0, 5),
        "max_in_flight": st.sampled_from([0, 1, 4, 64]),
        "blocked": st.booleans(),
        "broken": st.sampled_from(["closed", "open", "probed", "half_open"]),
        "excluded": st.booleans(),
        "kv": st.one_of(st.none(), st.floats(0, 1)),
        "labels": st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy"), max_size=2),
        "version": st.sampled_from(["", "3", "12"]),
        "ramp_s": st.sampled_from([0.0, 50.0]),
    }
)
WANTS = st.builds(
    lambda text, session, labels, low: prompt(
        text * 40, session=session, needs=Needs(tuple(labels), low) if labels or low else Needs()
    ),
    st.sampled_from(["", "tide ", "ebb and flow "]),
    st.sampled_from(["", "s1", "s2"]),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=2),
    st.sampled_from(["", "3", "10"]),
)
NOW = 100.0


def build(states: list[dict[str, object]]) -> tuple[list[Seat], set[tuple[str, int]], list[bool]]:
    """Seats, those excluded, and of each whether it may be taken as far as the request's needs go."""
    seats, excluded, may = [], set(), []
    for i, state in enumerate(states):
        seat = Seat(
            worker(
                f"w{i}",
                max_in_flight=state["max_in_flight"],
                labels=state["labels"],
                weight_version=state["version"],
                ramp_s=state["ramp_s"],
            ),
            80.0,
        )
        seat.own, seat.others = int(str(state["own"])), int(str(state["others"]))
        if state["blocked"]:
            seat.blocked_until = NOW + 1
        broken = state["broken"]
        if broken != "closed":
            seat.failed(NOW if broken == "open" else NOW - 5)
        if broken == "probed":
            seat.breaker.entered()
        if state["kv"] is not None:
            seat.reported(int(str(state["own"])), NOW - 1, float(str(state["kv"])))
        if state["excluded"]:
            excluded.add(seat.id)
        limit = int(str(state["max_in_flight"]))
        room = limit == 0 or seat.own < limit
        may.append(room and not state["blocked"] and broken in ("closed", "half_open") and not state["excluded"])
        seats.append(seat)
    return seats, excluded, may


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(states=st.lists(STATES, max_size=6), wants=st.lists(WANTS, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_nobody_ineligible_is_picked_and_one_seed_gives_one_answer(
    name: str, states: list[dict[str, object]], wants: list[Want], seed: int
) -> None:
    """RT1, RT7, F4, F11: blocked, broken, full, excluded or lacking what is asked for: never. Somebody else: always."""
    runs = []
    for _ in range(2):
        seats, excluded, may = build(states)
        made, rng = policy(name), random.Random(seed)
        runs.append([pick(made, seats, excluded, NOW, rng, want) for want in wants])
        for want, got in zip(wants, runs[-1], strict=True):
            eligible = [
                seat.worker.worker_id
                for seat, ok in zip(seats, may, strict=True)
                if ok and meets(seat.worker, want.needs)
            ]
            assert (got is None) == (not eligible)
            assert got is None or got.worker.worker_id in eligible
    first, second = ([got.worker.worker_id if got else None for got in run] for run in runs)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_one_that_others_seem_to_fill_is_the_last_resort(name: str) -> None:
    seats = seats_of(3, max_in_flight=4)
    seats[0].others = seats[2].others = 4
    sender = Sender(seats, policy(name))
    assert [sender.send(want=prompt("x" * 999, session="s")).worker.worker_id for _ in range(4)] == ["w1"] * 4
    assert sender.send(want=prompt("x" * 999, session="s")).worker.worker_id in ("w0", "w2")


# ------------------------------------------------------------ distribution


def test_round_robin_goes_round_and_survives_changes() -> None:
    sender = Sender(seats_of(3), policy("round_robin"))
    assert [sender.send(hold=False).worker.worker_id for _ in range(5)] == ["w0", "w1", "w2", "w0", "w1"]
    sender.seats = [*sender.seats, *[Seat(worker("w3"), 0.0)]]
    assert [sender.send().worker.worker_id for _ in range(3)] == ["w2", "w3", "w0"]
    sender.seats = sender.seats[2:]
    assert [sender.send().worker.worker_id for _ in range(3)] == ["w2", "w3", "w2"]


@given(st.integers(1, 7), st.integers(1, 60))
def test_round_robin_is_even(workers: int, requests: int) -> None:
    sender = Sender(seats_of(workers), policy("round_robin"))
    counts = Counter(sender.send(hold=False).worker.worker_id for _ in range(requests))
    assert max(counts.values()) - min([*counts.values(), *([0] if len(counts) < workers else [])]) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_weighted_follows_the_weights_exactly(weights: list[int]) -> None:
    """Over one full round each worker has exactly its weight; and nobody waits for the end of the round."""
    seats = [Seat(worker(f"w{i}", labels={"weight": str(w)}), 0.0) for i, w in enumerate(weights)]
    sender = Sender(seats, policy("weighted"))
    got = [sender.send(hold=False).worker.worker_id for _ in range(sum(weights))]
    assert Counter(got) == {f"w{i}": w for i, w in enumerate(weights)}


def test_weighted_by_capacity_and_with_slow_start() -> None:
    seats = [Seat(worker("big", max_in_flight=300), 0.0), Seat(worker("small", max_in_flight=100), 0.0)]
    sender = Sender(seats, policy("weighted"))
    assert Counter(sender.send(hold=False).worker.worker_id for _ in range(80)) == {"big": 60, "small": 20}
    new = [Seat(worker("old"), 0.0), Seat(worker("new", ramp_s=100.0), 1000.0)]
    early = Counter(Sender(new, policy("weighted")).send(1000.0, hold=False).worker.worker_id for _ in range(1))
    assert early == {"old": 1}
    sender = Sender(new, policy("weighted"))
    counts = Counter(sender.send(1000.0, hold=False).worker.worker_id for _ in range(110))
    assert counts == {"old": 100, "new": 10}
    counts = Counter(sender.send(1100.0, hold=False).worker.worker_id for _ in range(100))
    assert counts == {"old": 50, "new": 50}


@pytest.mark.parametrize("label", ["", "-1", "0", "nan", "inf", "1e9", "many"])
def test_a_weight_that_makes_no_sense_is_none(label: str) -> None:
    seats = [Seat(worker("a", labels={"weight": label}), 0.0), Seat(worker("b"), 0.0)]
    sender = Sender(seats, policy("weighted"))
    assert Counter(sender.send(hold=False).worker.worker_id for _ in range(10)) == {"a": 5, "b": 5}


def test_random_reaches_everybody_about_as_often() -> None:
    sender = Sender(seats_of(4), policy("random"))
    counts = Counter(sender.send(hold=False).worker.worker_id for _ in range(4000))
    assert all(900 < counts[f"w{i}"] < 1100 for i in range(4))


def test_power_of_two_spreads_better_than_chance_and_sees_load() -> None:
    """Balls into bins: the fullest of random bins is much fuller than the fullest of the better of two."""
    fullest = {}
    for name in ("random", "power_of_two", "least_in_flight"):
        sender = Sender(seats_of(50), policy(name), random.Random(3))
        for _ in range(500):
            sender.send()
        fullest[name] = max(seat.own for seat in sender.seats)
    assert fullest["least_in_flight"] == 10
    assert fullest["power_of_two"] <= 13 < 16 <= fullest["random"]


def test_least_in_flight_adds_own_to_the_last_report() -> None:
    """RT6: between two reports our own requests count at once."""
    sender = Sender(seats_of(2), policy("least_in_flight"))
    sender.seats[0].reported(3, 50.0)
    assert [sender.send(50.0).worker.worker_id for _ in range(5)] == ["w1", "w1", "w1", "w0", "w1"]


# ------------------------------------------------------------ KV cache and cost


def test_least_kv_corrects_for_what_was_sent_since_the_report() -> None:
    sender = Sender(seats_of(2), policy("least_kv"))
    sender.seats[0].reported(10, 50.0, 0.50)
    sender.seats[1].reported(10, 50.0, 0.40)
    assert [sender.send(50.0).worker.worker_id for _ in range(2)] == ["w1", "w1"]  # each adds about 0.045
    assert Counter(sender.send(50.0).worker.worker_id for _ in range(6)) == {"w0": 3, "w1": 3}


def test_an_unknown_or_old_kv_use_is_not_an_empty_cache() -> None:
    seats = seats_of(3)
    assert estimated_kv(seats, 50.0) is None
    seats[0].reported(1, 50.0, 0.2)
    seats[1].reported(1, 50.0, 0.6)
    uses = estimated_kv(seats, 50.0)
    assert uses == pytest.approx([0.2, 0.6, 0.4])
    assert Sender(seats, policy("least_kv")).send(50.0).worker.worker_id == "w0"
    assert estimated_kv(seats, 50.0 + Seat.KV_MAX_AGE_S + 1) is None
    seats[2].own = 0
    seats[0].own = seats[1].own = 2
    assert Sender(seats, policy("least_kv")).send(60.0).worker.worker_id == "w2"  # nothing known: by requests


def test_request_cost_sees_the_size_of_requests() -> None:
    """RT12: one request of 40,000 tokens weighs more than three small ones."""
    sender = Sender(seats_of(2), policy("request_cost"))
    big, small = prompt("x" * 120_000, 10_000), prompt("x" * 400, 100)
    first = sender.send(want=big)
    assert all(sender.send(want=small) is not first for _ in range(10))
    sender.end(first, 1.0, big)
    assert sender.send(want=small) is first
    assert first.own_tokens == 200


def test_request_cost_expects_answers_as_long_as_they_were() -> None:
    made = policy("request_cost")
    assert made.cost(prompt("", 4000)) == (4000, 0)
    assert made.cost(prompt("")) == (256, 0)
    made.expected_output_tokens = 100.0
    assert made.cost(prompt("", 4000)) == (100, 0)
    assert made.cost(prompt("", 7)) == (7, 0)
    assert made.cost(prompt("x" * 400)) == (200, 0)


def test_request_cost_avoids_a_full_cache_and_no_cache_is_taken_as_empty() -> None:
    sender = Sender(seats_of(2), policy("request_cost"))
    sender.seats[0].reported(0, 50.0, 0.97)
    sender.seats[1].reported(0, 50.0, 0.30)
    assert all(sender.send(50.0, prompt("x" * 400, 100)).worker.worker_id == "w1" for _ in range(8))


def test_kv_cost_takes_known_prefixes_off_and_counts_prefill_once() -> None:
    sender = Sender(seats_of(2), policy("kv_cost", chunk_bytes=64, output_tokens=16))
    long = prompt("tide " * 4000)
    first = sender.send(want=long, hold=False)
    assert sender.send(want=long, hold=False) is first
    other = prompt("ebb " * 4000)
    assert sender.send(want=other) is not first  # served less
    # The prefill ahead there is 4,000 tokens; this one's own prefix is worth 5,000.
    assert sender.send(want=long) is first
    assert first.own_prefill == 5000
    assert isinstance(sender.policy, KvCost)


# ------------------------------------------------------------ prefixes


def test_a_conversation_stays_where_its_prefix_is() -> None:
    """RT13: multi-round tool loops keep a session on one worker when it helps prefix reuse."""
    sender = Sender(seats_of(4), policy("prefix_aware", chunk_bytes=64))
    homes = {}
    for name in ("ann", "bob", "cat", "dan"):
        homes[name] = sender.send(want=prompt(f"You help {name}. " + "rule " * 200)).worker.worker_id
    assert len(set(homes.values())) == 4
    for turn in range(1, 6):
        for name, home in homes.items():
            text = f"You help {name}. " + "rule " * 200 + "and then? " * 50 * turn
            assert sender.send(want=prompt(text), hold=False).worker.worker_id == home


def test_an_unbalanced_prefix_falls_back_to_the_least_loaded() -> None:
    """F8"""
    sender = Sender(seats_of(3), policy("prefix_aware", chunk_bytes=64, most_extra=4, most_ratio=1.5))
    hot = prompt("system prompt of everybody " * 100)
    for _ in range(300):
        sender.send(want=hot)
        loads = sorted(seat.own for seat in sender.seats)
        assert loads[-1] <= max(loads[0] + 1 + 4, 1.5 * (loads[0] + 1) + 1)


def test_a_short_common_beginning_is_no_reason() -> None:
    sender = Sender(seats_of(2), policy("prefix_aware", chunk_bytes=16, least_share=0.5))
    sender.send(want=prompt("common head 0123 " + "a" * 400))
    assert sender.send(want=prompt("common head 0123 " + "b" * 400)).worker.worker_id == "w1"


def test_a_worker_that_came_back_has_an_empty_cache() -> None:
    """F18"""
    seats = seats_of(2)
    sender = Sender(seats, policy("prefix_aware", chunk_bytes=64))
    text = prompt("tide " * 100)
    first = sender.send(want=text, hold=False)
    again = Seat(worker(first.worker.worker_id, 2), 0.0)
    again.requests_total = 5
    sender.seats = [again, next(seat for seat in seats if seat is not first)]
    assert sender.send(want=text).worker.worker_id != first.worker.worker_id


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(0, 20)), max_size=60), st.integers(4, 64))
def test_the_prefix_index_is_bounded_and_never_promises_what_it_was_not_told(
    sent: list[tuple[int, int, int]], most: int
) -> None:
    """F8: memory. Each prompt is `length` chunks of family `n`."""
    index = PrefixIndex(most)
    told: dict[tuple[str, int], dict[int, int]] = {}
    for family, length, seat in sent:
        seat_id = (f"w{seat}", 1)
        index.sent([hash((family, i)) for i in range(length)], seat_id)
        told.setdefault(seat_id, {})[family] = max(length, told.get(seat_id, {}).get(family, 0))
        assert len(index) <= most
    for family in range(41):
        known = index.known([hash((family, i)) for i in range(30)], told)
        for seat_id, depth in known.items():
            assert 0 < depth <= told[seat_id].get(family, 0)


def test_chunks_are_a_chain_and_bounded() -> None:
    a, b = prompt("A" * 64 + "same" * 64), prompt("B" * 64 + "same" * 64)
    assert len(a.chunks(64)) == 5
    assert not set(a.chunks(64)) & set(b.chunks(64))
    assert prompt("A" * 64 + "same" * 32).chunks(64) == a.chunks(64)[:3]
    assert len(prompt("x" * 10_000_000).chunks(64)) == 256
    assert prompt("short").chunks(64) == ()


# ------------------------------------------------------------ sessions


def test_sessions_stay_and_several_routers_agree() -> None:
    one, two = (Sender(seats_of(5), policy("sticky")) for _ in range(2))
    homes = {}
    for i in range(200):
        homes[i] = one.send(want=Want(session=f"s{i}"), hold=False).worker.worker_id
        assert two.send(want=Want(session=f"s{i}"), hold=False).worker.worker_id == homes[i]
    counts = Counter(homes.values())
    assert len(counts) == 5
    assert all(20 <= count <= 60 for count in counts.values())
    for i in range(200):
        assert one.send(want=Want(session=f"s{i}"), hold=False).worker.worker_id == homes[i]


def test_a_worker_that_leaves_moves_its_own_sessions_only() -> None:
    homes = {}
    sender = Sender(seats_of(4), policy("sticky"))
    for i in range(100):
        homes[i] = sender.send(want=Want(session=f"s{i}"), hold=False).worker.worker_id
    fresh = Sender(sender.seats[1:], policy("sticky"))  # another router, which remembers nothing
    for each in (Sender(sender.seats[1:], sender.policy), fresh):
        moved = {i for i in homes if each.send(want=Want(session=f"s{i}"), hold=False).worker.worker_id != homes[i]}
        assert moved == {i for i, home in homes.items() if home == "w0"}


def test_the_gate_moves_a_hot_session_and_remembers_where() -> None:
    sender = Sender(seats_of(2), policy("sticky", most_extra=3, most_ratio=1.0))
    hot = Want(session="hot")
    first = [sender.send(want=hot) for _ in range(4)]
    assert len(set(first)) == 1
    moved = sender.send(want=hot)
    assert moved is not first[0]
    assert sender.send(want=hot) is moved
    assert abs(sender.seats[0].own - sender.seats[1].own) <= 4


def test_sessions_are_bounded_and_without_one_load_decides() -> None:
    made = policy("sticky", max_sessions=16)
    assert isinstance(made, Sticky)
    sender = Sender(seats_of(3), made)
    for i in range(100):
        sender.send(want=Want(session=f"s{i}"), hold=False)
        assert len(made) <= 16
    counts = Counter(sender.send().worker.worker_id for _ in range(30))
    assert set(counts.values()) == {10}
    assert len(made) == 16


def test_sticky_by_request_id() -> None:
    sender = Sender(seats_of(5), policy("sticky", by="request_id"))
    first = sender.send(want=Want(request_id="r1", session="a"), hold=False)
    assert all(sender.send(want=Want(request_id="r1", session=f"{i}"), hold=False) is first for i in range(10))


# ------------------------------------------------------------ needs and roles


def test_labels_by_key_subset() -> None:
    """RT7"""
    has = worker("a", labels={"zone": "a", "gpu": "h100"})
    assert meets(has, Needs())
    assert meets(has, Needs((("zone", "a"),)))
    assert meets(has, Needs((("gpu", "h100"), ("zone", "a"))))
    assert not meets(has, Needs((("zone", "b"),)))
    assert not meets(has, Needs((("zone", "a"), ("disk", "ssd"))))


@pytest.mark.parametrize(
    ("version", "low", "high", "ok"),
    [
        ("", "", "", True),
        ("", "1", "", False),
        ("", "", "9", False),
        ("10", "9", "", True),
        ("9", "10", "", False),
        ("step-10", "step-9", "step-11", True),
        ("step-12", "step-9", "step-11", False),
        ("v1.10.0", "v1.9.9", "", True),
        ("007", "7", "7", True),
    ],
)
def test_weight_versions(version: str, low: str, high: str, ok: bool) -> None:
    """RT10"""
    assert meets(worker("a", weight_version=version), Needs((), low, high)) is ok


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6))
def test_versions_order_as_numbers(numbers: list[int]) -> None:
    assert sorted((f"step-{n}" for n in numbers), key=order) == [f"step-{n}" for n in sorted(numbers)]


def test_roles() -> None:
    both = {Role.PREFILL: "pre", Role.DECODE: "dec"}
    assert pool_for(both, Role.PREFILL) == "pre"
    assert pool_for(both, None) == "dec"
    assert pool_for(both, Role.MIXED) is None
    assert pool_for({Role.MIXED: "m"}, Role.PREFILL) == "m"
    assert pool_for({Role.MIXED: "m", **both}, None) == "m"
    assert pool_for({}, None) is None


def test_prefix_policies_share_nothing_between_pools() -> None:
    a, b = policy("prefix_aware"), policy("prefix_aware")
    assert isinstance(a, PrefixAware)
    assert isinstance(b, PrefixAware)
    a.sent(seats_of(1)[0], prompt("x" * 1000))
    assert (len(a.index), len(b.index)) == (3, 0)


# ------------------------------------------------------------ capabilities


def test_workers_that_others_ask_for_are_spared_while_that_is_balanced() -> None:
    """RT7, PL5, seed 2 §2.03: what needs nothing leaves the workers with asked labels alone; labels nobody asks for
    mean nothing; beyond the gate load decides."""
    seats = [Seat(worker("a", labels={"gpu": "big", "host": "1"}), 0.0), Seat(worker("b", labels={"host": "2"}), 0.0)]
    sender = Sender(seats, policy("capabilities", most_extra=2, most_ratio=1))
    assert [sender.send().worker.worker_id for _ in range(4)] == ["a", "b", "a", "b"]
    assert sender.send(want=Want(needs=Needs((("gpu", "big"),)))).worker.worker_id == "a"
    assert [sender.send().worker.worker_id for _ in range(5)] == ["b", "b", "b", "b", "a"]


def test_asked_sets_are_bounded() -> None:
    made = policy("capabilities")
    for number in range(100):
        made.sent(seats_of(1)[0], Want(needs=Needs((("zone", str(number)),))))
    assert len(made._asked) == 32  # type: ignore[attr-defined]
