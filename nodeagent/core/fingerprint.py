"""Whether two launches give the same engine."""

import hashlib
import json

from springtide.model.codec import to_plain
from springtide.model.desired import EngineLaunch

_WHAT_RUNS = (
    "engine",
    "model",
    "served_model_name",
    "tensor_parallel_size",
    "engine_args",
    "engine_env",
    "interpreter",
)


def fingerprint(launch: EngineLaunch) -> str:
    """16 hex digits, equal for the same engine, model, size and flags; GPUs, bounds and timeouts do not count."""
    plain = to_plain(launch)
    text = json.dumps({name: plain[name] for name in _WHAT_RUNS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
