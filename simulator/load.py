"""Loads: the traces that people publish, and generators.

Formats, told apart by their header: Azure's LLM inference traces of 2023 (TIMESTAMP, ContextTokens, GeneratedTokens)
and splitwise's (request_id, request_type, application_id, arrival_timestamp, batch_size, prompt_size, token_size). A
line that cannot be read is named with its line and column. Azure traces are sorted by definition; splitwise's need not
be.
"""

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from springtide.errors import InvalidArgument

DEFAULT_KIND = "default"
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SPLITWISE = ("arrival_timestamp", "prompt_size", "token_size")
_LARGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the begin of the load, and its sizes in tokens. `kind` chooses its pools."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str = DEFAULT_KIND


# ------------------------------------------------------------------ traces


def read_trace(path: Path) -> list[Arrival]:
    """A trace, sorted by time; its first arrival is at 0 (Azure) or at its own time (splitwise). Raises
    InvalidArgument."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            columns = {name.strip(): at for at, name in enumerate(header)}
            if all(name in columns for name in _AZURE):
                return _read_azure(path, reader, columns)
            if all(name in columns for name in _SPLITWISE):
                return _read_splitwise(path, reader, columns)
    except OSError as error:
        problem = error.strerror or str(error)
        raise InvalidArgument(field="trace", value=str(path), problem=problem, remedy="Name a readable file.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(
            field="trace", value=str(path), problem=f"is no CSV text ({error})", remedy="Name a CSV file."
        ) from None
    wanted = f"{', '.join(_AZURE)} (Azure 2023) or {', '.join(_SPLITWISE)} (splitwise)"
    raise _bad(path, 1, "header", ",".join(header), f"has neither the columns {wanted}", "Name a trace of either kind.")


def _read_azure(path: Path, reader: Iterator[list[str]], columns: dict[str, int]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    first: datetime | None = None
    last = -math.inf
    for line, row in _rows(path, reader, max(columns[name] for name in _AZURE)):
        text = row[columns["TIMESTAMP"]]
        try:
            at = datetime.strptime(text[:26].ljust(26, "0"), "%Y-%m-%d %H:%M:%S.%f")  # noqa: DTZ007 (only differences)
        except ValueError:
            remedy = "Write it as 2023-11-16 18:17:03.9799600."
            raise _bad(path, line, "TIMESTAMP", text, "is no time stamp", remedy) from None
        first = first or at
        offset = (at - first).total_seconds()
        if offset < last:
            problem = f"is earlier than the line before it (by {last - offset:.3f} s)"
            raise _bad(path, line, "TIMESTAMP", text, problem, "Sort the trace by time.")
        last = offset
        prompt = _count(path, line, "ContextTokens", row[columns["ContextTokens"]])
        output = _count(path, line, "GeneratedTokens", row[columns["GeneratedTokens"]])
        arrivals.append(Arrival(offset, prompt, output))
    return _not_empty(path, arrivals)


def _read_splitwise(path: Path, reader: Iterator[list[str]], columns: dict[str, int]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for line, row in _rows(path, reader, max(columns[name] for name in _SPLITWISE)):
        text = row[columns["arrival_timestamp"]]
        try:
            at = float(text)
        except ValueError:
            at = math.nan
        if not 0 <= at < math.inf:
            raise _bad(path, line, "arrival_timestamp", text, "is no time in seconds", "Write seconds, e.g. 12.5.")
        prompt = _count(path, line, "prompt_size", row[columns["prompt_size"]])
        output = _count(path, line, "token_size", row[columns["token_size"]])
        kind = row[columns["application_id"]].strip() if columns.get("application_id", 99) < len(row) else ""
        arrivals.append(Arrival(at, prompt, output, kind or DEFAULT_KIND))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return _not_empty(path, arrivals)


def _rows(path: Path, reader: Iterator[list[str]], last_column: int) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(reader, start=2):
        if not row or not any(field.strip() for field in row):
            raise _bad(path, line, "1", "", "is empty", "Remove the line.")
        if len(row) <= last_column:
            problem = f"is missing: the line has {len(row)} columns"
            raise _bad(path, line, str(len(row) + 1), ",".join(row), problem, "Complete or remove the line.")
        yield line, row


def _count(path: Path, line: int, column: str, text: str) -> int:
    """At least 1: a request without a token is none (the traces round down to 0 here and there)."""
    stripped = text.strip()
    if not stripped.isdecimal() or int(stripped) > _LARGEST:
        raise _bad(path, line, column, text, "is no number of tokens", "Write a whole number of tokens.")
    return max(1, int(stripped))


def _not_empty(path: Path, arrivals: list[Arrival]) -> list[Arrival]:
    if not arrivals:
        raise _bad(path, 2, "1", "", "is missing: the trace has no requests", "Name a trace with requests.")
    return arrivals


def _bad(path: Path, line: int, column: str, value: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        field=f"{path.name} line {line} column {column}",
        value=value[:80],
        problem=problem,
        remedy=remedy,
        reason="BAD_TRACE",
    )


# ------------------------------------------------------------------ generators


def poisson(rate: float, length_s: float, prompt: float, output: float, seed: int) -> list[Arrival]:
    """`rate` requests per second; sizes are exponential around their means (tokens)."""
    rng = random.Random(seed)
    return _sized(_poisson_times(rng, rate, 0.0, length_s), prompt, output, rng)


def bursty(
    rate: float,
    length_s: float,
    prompt: float,
    output: float,
    seed: int,
    *,
    peak: float = 6.0,
    burst_s: float = 12.0,
    period_s: float = 120.0,
) -> list[Arrival]:
    """The mean `rate`, with bursts of `peak` times it: about `burst_s` long, one in about `period_s`."""
    share = burst_s / period_s
    if not 0 < share * peak <= 1:
        problem = f"bursts of {burst_s:g} s in {period_s:g} s alone would be more than the mean"
        raise InvalidArgument(field="peak", value=peak, problem=problem, remedy=f"Give at most {1 / share:g}.")
    rng = random.Random(seed)
    quiet = rate * (1 - peak * share) / (1 - share)
    times: list[float] = []
    at = 0.0
    while at < length_s:
        calm_end = at + rng.expovariate(1 / (period_s - burst_s))
        times += _poisson_times(rng, quiet, at, min(calm_end, length_s))
        burst_end = calm_end + rng.expovariate(1 / burst_s)
        times += _poisson_times(rng, rate * peak, calm_end, min(burst_end, length_s))
        at = burst_end
    return _sized(times, prompt, output, rng)


def _poisson_times(rng: random.Random, rate: float, begin: float, end: float) -> list[float]:
    times: list[float] = []
    at = begin
    while rate > 0:
        at += rng.expovariate(rate)
        if at >= end:
            break
        times.append(at)
    return times


def _sized(times: list[float], prompt: float, output: float, rng: random.Random) -> list[Arrival]:
    return [
        Arrival(at, max(1, round(rng.expovariate(1 / prompt))), max(1, round(rng.expovariate(1 / output))))
        for at in times
    ]


# ------------------------------------------------------------------ changes


def scaled(arrivals: list[Arrival], factor: float) -> list[Arrival]:
    """`factor` times the load with the same course: whole copies a little apart, and a share of the last one."""
    if factor <= 0:
        raise InvalidArgument(field="scale", value=factor, problem="must be above 0", remedy="E.g. 2.5.")
    copies, share = int(factor), factor - int(factor)
    found: list[Arrival] = []
    owed = 0.0
    for arrival in arrivals:
        owed += share
        extra = owed >= 1.0
        owed -= extra
        found += [replace(arrival, at_s=arrival.at_s + 0.05 * copy) for copy in range(copies + extra)]
    return sorted(found, key=lambda arrival: arrival.at_s)


def cut(arrivals: list[Arrival], begin_s: float, length_s: float | None) -> list[Arrival]:
    """The part of a load from `begin_s` on, at 0 then."""
    end = math.inf if length_s is None else begin_s + length_s
    return [replace(a, at_s=a.at_s - begin_s) for a in arrivals if begin_s <= a.at_s < end]


def burst_times(arrivals: list[Arrival], factor: float, *, window_s: float = 10.0, above: float = 2.0) -> list[Arrival]:
    """The load with its bursts made `factor` times as high: windows with more than `above` times the mean rate."""
    if not arrivals:
        return []
    mean = len(arrivals) / max(arrivals[-1].at_s, window_s) * window_s
    counts: dict[int, int] = {}
    for arrival in arrivals:
        counts[int(arrival.at_s / window_s)] = counts.get(int(arrival.at_s / window_s), 0) + 1
    calm = [a for a in arrivals if counts[int(a.at_s / window_s)] <= above * mean]
    bursts = [a for a in arrivals if counts[int(a.at_s / window_s)] > above * mean]
    return sorted([*calm, *scaled(bursts, factor)], key=lambda arrival: arrival.at_s)
