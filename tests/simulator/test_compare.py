"""The comparison: all contestants run, tables say who is on the front, the page keeps its text."""

from pathlib import Path

import pytest

from controlplane.core.policies import RECOMMENDED
from simulator.compare import BEGIN, END, Case, Row, arrivals, beaten_by, cases, run_case, to_markdown, write_tables
from simulator.peers import PEERS
from springtide.errors import InvalidArgument
from springtide.model.pool import PolicySpec

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
CASE = Case("conv", 20.0)


def row(policy: str, attainment: float, worker_seconds: float) -> Row:
    return Row(policy, attainment, worker_seconds, 3, 0, 1.0, 0)


def test_the_cases() -> None:
    """SM6: both traces and ten times the code trace's bursts, two start-up times."""
    found = cases()
    assert [(case.load, case.start_up_s) for case in found] == [
        (load, start_up_s) for load in ("code", "conv", "code-burst") for start_up_s in (20.0, 120.0)
    ]
    assert len(arrivals("code-burst", TRACES)) > 3 * len(arrivals("code", TRACES))


def test_who_is_beaten() -> None:
    """No peer may have both fewer worker-seconds and higher attainment."""
    ours = row("ours", 0.9, 100.0)
    assert beaten_by([ours, row("dearer", 0.95, 120.0), row("worse", 0.5, 50.0), row("same", 0.9, 90.0)]) == []
    rows = [ours, row("better", 0.91, 99.0)]
    assert beaten_by(rows) == ["better"]
    text = to_markdown({CASE: rows})
    assert "| **ours** | 90.0 %" in text
    assert "| better * | 91.0 %" in text
    assert "Beaten by better." in text


@pytest.mark.parametrize("name", [RECOMMENDED.name, *PEERS])
def test_every_contestant_runs(name: str) -> None:
    """SM6: a part of the smooth trace; nobody loses a request, everybody keeps within the bounds."""
    found = run_case(CASE, PolicySpec(name), name, TRACES, length_s=120.0)
    assert found.failed == 0
    assert 0 <= found.attainment <= 1
    assert 419 <= found.worker_seconds <= 16 * 600


@pytest.mark.slow
@pytest.mark.parametrize(("load", "near"), [("code", "peer_ray_serve"), ("conv", "peer_skyserve")])
def test_the_default_is_on_the_front(load: str, near: str) -> None:
    """SM6, the comparison that must be won, shortened: the first 1200 s of each trace, against the peer that comes
    nearest there."""
    names = [RECOMMENDED.name, near]
    rows = [run_case(Case(load, 20.0), PolicySpec(name), name, TRACES, length_s=1200.0) for name in names]
    assert beaten_by(rows) == []
    assert rows[0].attainment > 0.8
    assert rows[0].flaps <= 2


def test_the_published_tables() -> None:
    """SM6: what docs/comparison.md says was made by the command, for all cases, peers and the default of today; nobody
    beats it."""
    text = PAGE.read_text()
    tables = text.split(BEGIN, 1)[1].split(END, 1)[0].split("### ")[1:]
    assert len(tables) == len(cases())
    for case, table in zip(cases(), tables, strict=True):
        lines = table.splitlines()
        assert lines[0] == case.title[0].upper() + case.title[1:]
        rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
        assert [row.strip("* ").replace("*", "") for row in rows] == [f"springtide {RECOMMENDED.name}", *PEERS]
        assert rows[0].endswith("** *"), "not on the Pareto front"
        assert "Beaten by" not in table


def test_the_page_keeps_its_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for tables in ("first", "second"):
        write_tables(page, tables)
    assert page.read_text() == f"before\n{BEGIN}\n\nsecond\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(InvalidArgument, match="no marks"):
        write_tables(page, "x")
