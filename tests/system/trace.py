"""The Azure LLM inference traces of 2023 as load: arrival times and sizes (CC-BY 4.0, AzurePublicDataset; Patel et al.,
Splitwise, ISCA 2024). Only the numbers are used; prompts are made here."""

import csv
import math
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start of the replay, and its sizes in tokens."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int


def read(name: str, *, start_s: float, length_s: float, compress: float = 1.0, max_tokens: int = 400) -> list[Arrival]:
    """The part [start_s, start_s + length_s) of a trace, its time divided by `compress`; outputs capped."""
    arrivals: list[Arrival] = []
    first: datetime | None = None
    with (TRACES / f"AzureLLMInferenceTrace_{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            at = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")  # noqa: DTZ007 (a difference is all we take)
            first = first or at
            offset = (at - first).total_seconds()
            if start_s <= offset < start_s + length_s:
                tokens = max(1, min(max_tokens, int(row["GeneratedTokens"])))
                size = max(1, int(row["ContextTokens"]))
                arrivals.append(Arrival(len(arrivals), (offset - start_s) / compress, size, tokens))
    return arrivals


def square_wave(arrivals: list[Arrival], *, period_s: float, high: float, low: float, seed: int) -> list[Arrival]:
    """Thins the second half of every period to `low` of its requests and the first half to `high` (0..1), by a hash of
    seed and number, so that the same seed gives the same load."""
    kept: list[Arrival] = []
    for arrival in arrivals:
        share = high if math.fmod(arrival.at_s, period_s) < period_s / 2 else low
        draw = ((arrival.number + 1) * 2654435761 + seed * 40503) % 2**32 / 2**32
        if draw < share:
            kept.append(arrival)
    assert all(a.at_s <= b.at_s for a, b in pairwise(kept))
    return kept
