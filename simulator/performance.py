"""How long an engine's step takes: from constants, or from a table of measurements in splitwise's format."""

import csv
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from nodeagent.engines.sim.batching import Timing
from springtide.errors import InvalidArgument

# A 70B model on one tensor-parallel node: about 8,000 prompt tokens per second, 12 ms a step for few sequences.
DEFAULT_TIMING = Timing(max_num_batched_tokens=2048, kv_blocks=16384)


class Performance(Protocol):
    """A timing model. `timing` bounds the batch (sequences, tokens per step, KV memory)."""

    @property
    def timing(self) -> Timing: ...

    def step_s(self, sequences: int, prefill_tokens: int) -> float:
        """Seconds for one step of so many sequences that computes so many prompt tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Constants:
    """The sim engine's own model."""

    timing: Timing = DEFAULT_TIMING

    def step_s(self, sequences: int, prefill_tokens: int) -> float:
        timing = self.timing
        seconds = timing.decode_base_s + timing.decode_per_request_s * sequences
        return (seconds + prefill_tokens / timing.prefill_tokens_per_s) * timing.scale


class Table:
    """Measured times, interpolated between the measured points and continued with the last slope beyond them.

    The columns of splitwise's perf_model.csv are read: model, hardware, tensor_parallel, prompt_size, batch_size,
    prompt_time and token_time (milliseconds).
    """

    def __init__(self, prompt_s: dict[int, float], token_s: dict[int, float], timing: Timing = DEFAULT_TIMING) -> None:
        self.timing = timing
        self._prompt = sorted(prompt_s.items())
        self._token = sorted(token_s.items())

    def step_s(self, sequences: int, prefill_tokens: int) -> float:
        seconds = _along(self._token, sequences)
        return seconds + (_along(self._prompt, prefill_tokens) if prefill_tokens else 0.0)

    @classmethod
    def read(
        cls, path: Path, *, model: str, hardware: str, tensor_parallel: int, timing: Timing | None = None
    ) -> "Table":
        """Raises InvalidArgument, with line and column for what cannot be read."""
        prompts: dict[int, list[float]] = defaultdict(list)
        tokens: dict[int, list[float]] = defaultdict(list)
        seen: set[tuple[str, str, int]] = set()
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for row in reader:
                line = reader.line_num
                key = (
                    row.get("model") or "",
                    row.get("hardware") or "",
                    int(_number(row, "tensor_parallel", path, line)),
                )
                seen.add(key)
                if key != (model, hardware, tensor_parallel):
                    continue
                batch = int(_number(row, "batch_size", path, line))
                prompt = int(_number(row, "prompt_size", path, line)) * batch
                prompts[prompt].append(_number(row, "prompt_time", path, line) / 1000)
                tokens[batch].append(_number(row, "token_time", path, line) / 1000)
        if not prompts:
            known = ", ".join(sorted({f"{m} {h} tp {tp}" for m, h, tp in seen})[:8])
            raise InvalidArgument(
                field="performance",
                value=f"{model} {hardware} tp {tensor_parallel}",
                problem=f"{path} has no row for it",
                remedy=f"It has: {known or 'nothing'}.",
            )
        mean_prompt = {size: sum(times) / len(times) for size, times in prompts.items()}
        mean_token = {size: sum(times) / len(times) for size, times in tokens.items()}
        return cls(mean_prompt, mean_token, timing or replace(DEFAULT_TIMING))


def _number(row: dict[str, str], column: str, path: Path, line: int) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidArgument(
            field=f"{path.name}:{line}.{column}", value=text, problem="is no number >= 0", remedy="Correct the line."
        )
    return value


def _along(points: list[tuple[int, float]], x: float) -> float:
    """Linear between points; through the origin below the first; the last slope beyond the last."""
    if len(points) == 1:
        return points[0][1] * max(1.0, x / points[0][0])
    at = bisect_left(points, (x,))
    if at == 0:
        return points[0][1] if x >= 1 else 0.0
    low, high = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        low, high = points[-2], points[-1]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return max(low[1] + slope * (x - low[0]), 0.0)
