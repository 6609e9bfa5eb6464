"""What a run leaves behind: summary, CSV files, picture and page; and the command line."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.cli import simulate
from simulator.load import poisson
from simulator.performance import Constants, Table
from simulator.replay import Fleet, Scenario, one_pool, replay
from simulator.results import moves, quantile, summarize
from simulator.world import Route, World
from springtide.errors import InvalidArgument
from springtide.model.enums import DecisionResult
from springtide.model.pool import PolicySpec
from springtide.model.record import Decision

TABLE = """model,hardware,prompt_size,batch_size,token_size,peak_power,prompt_time,token_time,e2e_time,tensor_parallel
llama2-70b,h100-80gb,512,1,128,100,60,20,3000,8
llama2-70b,h100-80gb,2048,1,128,100,200,22,3000,8
llama2-70b,h100-80gb,512,16,128,100,800,30,3000,8
bloom-176b,a100-80gb,512,1,128,100,90,40,3000,8
"""


def small_run() -> World:
    pool = one_pool(PolicySpec("load_ratio"), min_workers=1, max_workers=4, initial_workers=2)
    scenario = Scenario((pool,), {"default": Route("demo")}, Fleet(1, 4, 5.0))
    return replay(scenario, poisson(3.0, 120.0, 800.0, 60.0, 1))


def test_summary_counts_what_happened() -> None:
    """SM2: attainment, quantiles, worker-seconds by role and state."""
    world = small_run()
    summary = summarize(world)
    assert summary.requests == len(world.requests)
    assert summary.failed == 0
    assert 0.5 < summary.slo_attainment <= 1
    assert summary.ttft_p50_s is not None
    assert summary.ttft_p99_s is not None
    assert summary.ttft_p50_s <= summary.ttft_p99_s
    assert summary.worker_seconds_by_role == {"mixed": pytest.approx(summary.worker_seconds)}
    assert sum(summary.worker_seconds_by_state.values()) == pytest.approx(summary.worker_seconds)
    least = summary.length_s
    assert summary.worker_seconds >= least, "at least one worker all the time"


def test_quantiles_and_flaps() -> None:
    assert quantile([], 0.5) is None
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, 4.0]

    def decision(at: float, result: DecisionResult) -> Decision:
        return Decision("p", at, "x", result, 1, 2, "R", "")

    up, down = DecisionResult.SCALE_UP, DecisionResult.SCALE_DOWN
    history = [(0, up), (10, down), (50, up), (400, down), (800, up), (810, DecisionResult.HOLD)]
    assert moves(decision(at, result) for at, result in history) == (3, 2, 1)
    assert moves((decision(at, result) for at, result in history), since=100) == (1, 1, 0)


def test_a_table_of_measurements(tmp_path: Path) -> None:
    """SM4: splitwise's format, interpolated; what is not in it is named."""
    path = tmp_path / "perf.csv"
    path.write_text(TABLE)
    table = Table.read(path, model="llama2-70b", hardware="h100-80gb", tensor_parallel=8)
    assert table.step_s(1, 512) == pytest.approx(0.021 + 0.060)
    assert 0.060 < table.step_s(1, 1000) - table.step_s(1, 0) < 0.200
    assert table.step_s(16, 0) == pytest.approx(0.030)
    assert table.step_s(31, 0) > table.step_s(16, 0), "beyond the last point it goes on as it went"
    with pytest.raises(InvalidArgument, match="no row"):
        Table.read(path, model="gpt", hardware="h100-80gb", tensor_parallel=8)
    path.write_text(TABLE.replace("60,20", "sixty,20"))
    with pytest.raises(InvalidArgument, match="prompt_time"):
        Table.read(path, model="llama2-70b", hardware="h100-80gb", tensor_parallel=8)
    assert Constants().step_s(1, 8000) == pytest.approx(1.0102)


_LOADING = ("script", "img", "link")


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href") and tag in ("script", "img", "link")
        ]


def test_run_writes_everything(tmp_path: Path) -> None:
    """SM2: summary, one row per request, scaling log with the fourth seed's columns, PNG, and a page by itself."""
    out = tmp_path / "out"
    arguments = ["run", "--bursty", "4", "--length", "120", "--max-workers", "4", "--start-up", "5", "--out", str(out)]
    done = CliRunner().invoke(simulate, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    rows = list(csv.DictReader((out / "requests.csv").open()))
    assert len(rows) == summary["requests"] > 100
    first = rows[0]
    assert float(first["ttft_s"]) > 0
    assert first["worker"].startswith("demo-")
    assert (out / "scaling.csv").read_text().splitlines()[0] == "time,action,target,status"
    looks = list(csv.DictReader((out / "looks.csv").open()))
    assert int(looks[-1]["ended"]) == summary["requests"]
    assert (out / "picture.png").read_bytes().startswith(b"\x89PNG")
    page = Page()
    page.feed((out / "page.html").read_text())
    assert "svg" in page.tags
    assert not [link for link in page.links if not link.startswith(("data:", "#"))], "it needs nothing else"


def test_the_same_command_gives_the_same_files(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        out = tmp_path / name
        options = ["--poisson", "3", "--length", "60", "--no-picture", "--seed", "4", "--out", str(out)]
        assert CliRunner().invoke(simulate, ["run", *options]).exit_code == 0
        texts.append([(out / file).read_bytes() for file in ("requests.csv", "scaling.csv", "looks.csv")])
    assert texts[0] == texts[1]


def test_split_pools_from_the_command_line() -> None:
    """SM3: two roles, worker-seconds by role."""
    arguments = ["run", "--poisson", "2", "--length", "60", "--split", "1,2", "--no-picture", "--json"]
    done = CliRunner().invoke(simulate, arguments)
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["worker_seconds_by_role"]) == {"prefill", "decode"}


@pytest.mark.parametrize("routing", ["random", "round_robin", "least_in_flight", "request_cost"])
def test_routing_baselines(routing: str) -> None:
    """SM5: random, round robin, and the shortest queue by requests and by tokens, on the same load."""
    arguments = ["--poisson", "6", "--length", "60", "--initial-workers", "3", "--policy", "static", "--json"]
    done = CliRunner().invoke(simulate, ["run", "--routing", routing, *arguments])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["failed"] == 0
    assert summary["most_workers"] == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "exactly one load"),
        (["run", "--poisson", "1", "--bursty", "1"], "exactly one load"),
        (["run", "--poisson", "-1"], "no rate"),
        (["run", "--trace", "/nowhere.csv"], "No such file"),
        (["run", "--poisson", "1", "--policy", "magic"], "no such policy"),
        (["run", "--poisson", "1", "--set", "scale_up_treshold=0.5"], "scale_up_threshold"),
        (["run", "--poisson", "1", "--set", "scale_up_threshold"], "has no ="),
        (["run", "--poisson", "1", "--split", "two"], "two numbers"),
        (["run", "--poisson", "1", "--routing", "magic"], "routing"),
        (["run", "--poisson", "1", "--nodes", "1", "--gpus", "1", "--initial-workers", "4"], "do not become ACTIVE"),
        (["compare", "--loads", "magic"], "no load here"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(simulate, arguments)
    assert done.exit_code == 1
    assert told in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
