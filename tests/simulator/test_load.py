"""Loads: traces with their errors, generators, scale and bursts."""

from pathlib import Path

import pytest

from simulator.load import Arrival, burst_times, bursty, cut, poisson, read_trace, scaled
from springtide.errors import InvalidArgument

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SPLITWISE = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"


@pytest.mark.parametrize(("name", "rows", "length_s"), [("code", 8819, 3435.9), ("conv", 19366, 3501.7)])
def test_azure_traces(name: str, rows: int, length_s: float) -> None:
    """SM2: both published traces are read as they are described."""
    arrivals = read_trace(TRACES / f"AzureLLMInferenceTrace_{name}.csv")
    assert len(arrivals) == rows
    assert arrivals[0].at_s == 0
    assert arrivals[-1].at_s == pytest.approx(length_s, abs=0.1)


def test_splitwise_trace_need_not_be_sorted(tmp_path: Path) -> None:
    """SM2: splitwise's own test trace, which is not sorted."""
    path = tmp_path / "test.csv"
    path.write_text(SPLITWISE + "0,2,0,1,1,4096,32\n1,2,0,3,1,2048,8\n2,2,0,2,1,2048,16\n")
    assert read_trace(path) == [
        Arrival(1.0, 4096, 32, "0"),
        Arrival(2.0, 2048, 16, "0"),
        Arrival(3.0, 2048, 8, "0"),
    ]


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("", "line 1 column header", "neither the columns"),
        ("a,b\n1,2\n", "line 1 column header", "neither the columns"),
        (AZURE, "line 2 column 1", "no requests"),
        (AZURE + "2023-11-16 18:17:03.9799600,10,1\n\n", "line 3 column 1", "is empty"),
        (AZURE + "yesterday,10,1\n", "line 2 column TIMESTAMP", "no time stamp"),
        (AZURE + "2023-11-16 18:17:03.9799600,ten,1\n", "line 2 column ContextTokens", "no number of tokens"),
        (AZURE + "2023-11-16 18:17:03.9799600,10,-1\n", "line 2 column GeneratedTokens", "no number of tokens"),
        (AZURE + "2023-11-16 18:17:03.9799600,10\n", "line 2 column 3", "is missing"),
        (
            AZURE + "2023-11-16 18:17:03.9799600,10,1\n2023-11-16 18:17:01.9799600,10,1\n",
            "line 3 column TIMESTAMP",
            "earlier than the line before",
        ),
        (SPLITWISE + "0,2,0,soon,1,10,1\n", "line 2 column arrival_timestamp", "no time in seconds"),
        (SPLITWISE + "0,2,0,nan,1,10,1\n", "line 2 column arrival_timestamp", "no time in seconds"),
        (SPLITWISE + "0,2,0,1.5,1,1e3,1\n", "line 2 column prompt_size", "no number of tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, where: str, problem: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_trace(path)
    assert caught.value.field == f"bad.csv {where}"
    assert problem in str(caught.value)
    assert caught.value.remedy


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="no CSV text"):
        read_trace(tmp_path / "bytes.csv")


def test_generators_repeat_and_keep_their_mean() -> None:
    for make in (poisson, bursty):
        load = make(5.0, 4000.0, 1000.0, 100.0, 7)
        assert load == make(5.0, 4000.0, 1000.0, 100.0, 7)
        assert load != make(5.0, 4000.0, 1000.0, 100.0, 8)
        assert [a.at_s for a in load] == sorted(a.at_s for a in load)
        assert len(load) / 4000 == pytest.approx(5.0, rel=0.25)
        assert sum(a.prompt_tokens for a in load) / len(load) == pytest.approx(1000, rel=0.1)


def _peak(load: list[Arrival]) -> int:
    counts: dict[int, int] = {}
    for arrival in load:
        counts[int(arrival.at_s / 10)] = counts.get(int(arrival.at_s / 10), 0) + 1
    return max(counts.values())


def test_scale_and_bursts() -> None:
    code = read_trace(TRACES / "AzureLLMInferenceTrace_code.csv")
    assert len(scaled(code, 2.5)) == pytest.approx(2.5 * len(code), abs=1)
    assert len(scaled(code, 0.25)) == pytest.approx(0.25 * len(code), abs=1)
    assert _peak(burst_times(code, 10.0)) == pytest.approx(10 * _peak(code), rel=0.05)
    calm = burst_times(code, 1.0)
    assert len(calm) == len(code)
    part = cut(code, 100.0, 50.0)
    assert all(0 <= a.at_s < 50 for a in part)
    with pytest.raises(InvalidArgument, match="above 0"):
        scaled(code, 0.0)
