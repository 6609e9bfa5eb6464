"""What the peers' windows and counters need of a pool's past. Their loops keep state; here it is read off the samples,
so that the same object serves every look."""

from collections.abc import Callable, Sequence

from controlplane.core.policy import PolicyInputs
from controlplane.core.snapshot import LoadSample


def load_of(sample: LoadSample) -> float:
    """Requests in workers and waiting, as far as they are known."""
    return float(sample.load if sample.load is not None else sample.at_least)


def mean_load(samples: Sequence[LoadSample], now: float, window_s: float) -> float:
    """The average of the last `window_s`."""
    inside = [load_of(sample) for sample in samples if now - window_s < sample.at <= now]
    return sum(inside) / len(inside) if inside else 0.0


def rolling(
    samples: Sequence[LoadSample], window_s: float, of: Callable[[LoadSample], float]
) -> list[tuple[float, float]]:
    """(time, average of the window that ends there) for each sample."""
    found: list[tuple[float, float]] = []
    total, start = 0.0, 0
    values = [of(sample) for sample in samples]
    for index, sample in enumerate(samples):
        total += values[index]
        while samples[start].at <= sample.at - window_s:
            total -= values[start]
            start += 1
        found.append((sample.at, total / (index + 1 - start)))
    return found


def stood_for(verdicts: Sequence[tuple[float, bool]], now: float, seconds: float) -> bool:
    """Whether every verdict of the last `seconds` is true, and there are verdicts that old."""
    if not verdicts or verdicts[0][0] > now - seconds:
        return False
    return all(verdict for at, verdict in verdicts if at > now - seconds)


def last_move(inputs: PolicyInputs) -> float:
    """When the pool last moved; long ago when it never did."""
    moves = [at for at in (inputs.last_scale_up_at, inputs.last_scale_down_at) if at is not None]
    return max(moves, default=float("-inf"))
