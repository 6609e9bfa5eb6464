"""The agent's decisions: slices, convergence, fingerprints, back-off."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.core.converge import KnownWorker, Step, Verdict, converge, may_forget
from nodeagent.core.fingerprint import fingerprint
from nodeagent.core.slices import check_slice
from springtide.errors import InvalidArgument
from springtide.model.desired import DesiredWorker, EngineLaunch
from springtide.model.enums import Want

GPUS = tuple(str(i) for i in range(8))
STORE = "store-1"


@given(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=16), st.data())
def test_a_slice_is_had_once_whatever_the_ids_are(gpu_ids: list[str], data: st.DataObject) -> None:
    """NA1, NA2: indexes, UUIDs or MIG names; what one worker has is refused to the next."""
    size = data.draw(st.integers(1, len(gpu_ids)))
    wanted = data.draw(st.permutations(gpu_ids))[:size]
    check_slice(wanted, size, gpu_ids, {})
    with pytest.raises(InvalidArgument) as error:
        check_slice(wanted, size, gpu_ids, {data.draw(st.sampled_from(wanted)): "w-9"})
    assert error.value.reason == "GPU_IN_USE"


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one(size: int) -> None:
    """NA1: an error that names field, value and remedy."""
    with pytest.raises(InvalidArgument) as error:
        check_slice((), size, GPUS, {})
    assert (error.value.field, error.value.value) == ("tensor_parallel_size", size)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("wanted", "size", "reason"),
    [
        (("0", "1"), 1, "SLICE_SIZE"),
        (("0",), 2, "SLICE_SIZE"),
        (("0", "0"), 2, "SLICE_SIZE"),
        ((), 1, "SLICE_SIZE"),
        (("9",), 1, "GPU_NOT_AVAILABLE"),
        (("2",), 1, "GPU_IN_USE"),
    ],
)
def test_bad_slices(wanted: tuple[str, ...], size: int, reason: str) -> None:
    """NA14, F35: each has its reason; the error names the GPUs."""
    with pytest.raises(InvalidArgument) as error:
        check_slice(wanted, size, GPUS, {"2": "w-9"})
    assert error.value.reason == reason
    assert error.value.remedy


def test_a_node_without_gpus_runs_workers_on_the_cpu() -> None:
    """An empty slice is fine there."""
    check_slice((), 1, (), {})


def _launch(*gpu_ids: str, model: str = "m") -> EngineLaunch:
    return EngineLaunch("sim", model, "m", max(1, len(gpu_ids)), gpu_ids)


def _desired(worker_id: str, want: Want | None, generation: int, launch: EngineLaunch | None = None) -> DesiredWorker:
    return DesiredWorker(worker_id, "p", generation, want, launch or _launch("0"))


def _known(worker_id: str, generation: int, live: bool = True, store_id: str = STORE, *gpus: str) -> KnownWorker:
    return KnownWorker(worker_id, store_id, generation, Want.RUN, live, gpus or ("0",), fingerprint(_launch("0")))


def _verdicts(steps: list[Step]) -> list[tuple[str, Verdict, str]]:
    return [(step.desired.worker_id, step.verdict, step.reason) for step in steps]


def test_stops_come_before_drains_before_runs() -> None:
    """GPUs are freed before they are asked for."""
    desired = [_desired("a", Want.RUN, 1, _launch("1")), _desired("b", Want.DRAIN, 2), _desired("c", Want.STOP, 2)]
    known = {"b": _known("b", 1), "c": _known("c", 1)}
    assert [step.desired.worker_id for step in converge(STORE, desired, known, GPUS)] == ["c", "b", "a"]


@pytest.mark.parametrize("want", list(Want))
def test_an_older_generation_is_refused(want: Want) -> None:
    """CP12: fenced, whatever it says; the same generation again is followed."""
    known = {"a": _known("a", 5)}
    assert _verdicts(converge(STORE, [_desired("a", want, 4)], known, GPUS)) == [
        ("a", Verdict.IGNORE, "OLDER_GENERATION")
    ]
    assert converge(STORE, [_desired("a", want, 5)], known, GPUS)[0].verdict is Verdict.FOLLOW


@pytest.mark.parametrize("want", [Want.STOP, Want.DRAIN])
def test_a_foreign_store_stops_nothing(want: Want) -> None:
    """Whatever its generation."""
    known = {"a": _known("a", 5)}
    assert _verdicts(converge("store-2", [_desired("a", want, 99)], known, GPUS)) == [
        ("a", Verdict.IGNORE, "FOREIGN_STORE")
    ]


def test_a_foreign_store_takes_over_with_the_same_launch_only() -> None:
    """Its generations count from then on; another launch under the same id is not what runs here."""
    known = {"a": _known("a", 5)}
    assert converge("store-2", [_desired("a", Want.RUN, 1)], known, GPUS)[0].verdict is Verdict.FOLLOW
    other = _desired("a", Want.RUN, 1, _launch("0", model="other"))
    assert _verdicts(converge("store-2", [other], known, GPUS)) == [("a", Verdict.IGNORE, "FOREIGN_LAUNCH")]


def test_an_unknown_want_leaves_the_worker_as_it_is() -> None:
    """DESIGN rule 14: a newer word is never fatal."""
    assert converge(STORE, [_desired("a", None, 9)], {"a": _known("a", 5)}, GPUS) == []


def test_a_failed_start_is_not_in_the_way() -> None:
    """Desired state is sent again; a worker that failed at this generation holds no GPU."""
    known = {"a": _known("a", 1, live=False)}
    desired = [_desired("a", Want.RUN, 1), _desired("b", Want.RUN, 1)]
    assert _verdicts(converge(STORE, desired, known, GPUS)) == [
        ("a", Verdict.FOLLOW, ""),
        ("b", Verdict.FOLLOW, ""),
    ]


_wants = st.sampled_from([*Want, None])
_slices = st.lists(st.sampled_from(GPUS), min_size=1, max_size=3, unique=True).map(tuple)
_desires = st.builds(
    lambda worker, want, generation, gpus: _desired(worker, want, generation, _launch(*gpus)),
    st.sampled_from("abcdef"),
    _wants,
    st.integers(0, 5),
    _slices,
)


@st.composite
def _ledgers(draw: st.DrawFn) -> dict[str, KnownWorker]:
    free = list(GPUS)
    known = {}
    for worker_id in draw(st.lists(st.sampled_from("abcdef"), unique=True)):
        gpus = tuple(free.pop() for _ in range(draw(st.integers(1, 2))) if free)
        known[worker_id] = KnownWorker(
            worker_id=worker_id,
            store_id=draw(st.sampled_from([STORE, "store-2"])),
            generation=draw(st.integers(0, 5)),
            want=draw(st.sampled_from(list(Want))),
            live=bool(gpus) and draw(st.booleans()),
            gpu_ids=gpus,
            launch_fingerprint=fingerprint(_launch("0")),
        )
    return known


@given(st.lists(_desires, max_size=8), _ledgers())
def test_whatever_is_said(desired: list[DesiredWorker], known: dict[str, KnownWorker]) -> None:
    """Starts never share a GPU with anybody; only the own store's newer STOP reaches a live worker."""
    steps = converge(STORE, desired, known, GPUS)
    held = {gpu: worker.worker_id for worker in known.values() if worker.live for gpu in worker.gpu_ids}
    for step in steps:
        worker = known.get(step.desired.worker_id)
        if step.verdict is not Verdict.FOLLOW:
            assert step.reason
            assert step.message
            continue
        if worker is not None and worker.store_id == STORE:
            assert step.desired.generation >= worker.generation
        if step.desired.want in (Want.STOP, Want.DRAIN):
            assert worker is None or not worker.live or worker.store_id == STORE
        starts = step.desired.want is Want.RUN and (worker is None or not worker.live)
        if starts and (worker is None or worker.store_id != STORE or step.desired.generation > worker.generation):
            for gpu in step.desired.launch.gpu_ids:
                assert held.setdefault(gpu, step.desired.worker_id) == step.desired.worker_id
    assert len({step.desired.worker_id for step in steps if step.verdict is not Verdict.IGNORE}) == sum(
        step.verdict is not Verdict.IGNORE for step in steps
    )
    if len({worker.worker_id for worker in desired}) == len(desired):
        assert steps == converge(STORE, reversed(desired), known, GPUS)  # the order of the message does not matter


def test_only_dead_records_of_the_own_store_are_forgotten() -> None:
    """Absence never stops a worker, and never takes a live or foreign one out of the ledger."""
    assert may_forget(STORE, _known("a", 1, live=False), {"b"})
    assert not may_forget(STORE, _known("a", 1, live=False), {"a"})
    assert not may_forget(STORE, _known("a", 1, live=True), {"b"})
    assert not may_forget("store-2", _known("a", 1, live=False), {"b"})


def test_fingerprints() -> None:
    """Equal for the same engine, model, size and flags; GPUs and timeouts do not count, flags do."""
    base = _launch("0", "1")
    same = dataclasses.replace(base, gpu_ids=("2", "3"), start_timeout_s=1.0, max_in_flight=3, weight_version="v2")
    assert fingerprint(base) == fingerprint(same)
    for change in ({"engine_args": ("--x",)}, {"model": "n"}, {"tensor_parallel_size": 1}, {"engine_env": {"A": "b"}}):
        assert fingerprint(base) != fingerprint(dataclasses.replace(base, **change))
