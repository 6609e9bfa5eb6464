"""Faults that the simulated engine injects on demand: their grammar, and the state of those in force.

At start: `--fault KIND[,key=value...]`. At run time: POST /fault `{"kind": ..., key: value, ...}`, GET /fault,
DELETE /fault.

- crash: after_s or after_tokens (0: at once); exit_code (default 1) or signal (9: kills itself)
- hang: after_s or after_tokens; scope=process (nothing answers any more, not even SIGTERM) or engine (streams stall,
  /health answers); duration_s (0: for ever)
- slow_start, seconds: extra seconds before it listens; fail_start, exit_code: leaves instead of listening (start only)
- ignore_sigterm
- cut_stream: after_tokens; count (default 1 stream, 0: every one): the connection closes without an end
- stream_error: after_tokens, count: an error event, then [DONE], as a vLLM whose worker died sends it
- http_error: status (default 500), count: token requests are answered with this status
- refuse_health: /health answers 503; duration_s (0: until cleared)
- orphans: two children that ignore SIGTERM and outlive the process, one in its group, one in a session of its own
- release_nothing, count: a sleep answers 200 and gives no memory back (default: each one)
- wake_fails, status, count: /wake_up answers with this status (default 500) and memory stays released
- wake_slow, seconds: /wake_up takes so much longer
- weights_fail, status, count: a weight update is answered with this status (default 500) and changes nothing
- weights_slow, seconds: a weight update takes so much longer
- slow: factor: every step takes that many times as long
- pull_hangs, count: a request that fetches its KV from another engine waits for it for ever (default: each one)
- kv_dropped, count: KV that is held for another engine is gone when it is asked for (default: each one)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_FIELDS: dict[str, dict[str, float | str]] = {
    "crash": {"after_s": 0.0, "after_tokens": 0, "exit_code": 1, "signal": 0},
    "hang": {"after_s": 0.0, "after_tokens": 0, "scope": "process", "duration_s": 0.0},
    "slow_start": {"seconds": 5.0},
    "fail_start": {"exit_code": 1},
    "ignore_sigterm": {},
    "cut_stream": {"after_tokens": 1, "count": 1},
    "stream_error": {"after_tokens": 1, "count": 1},
    "http_error": {"status": 500, "count": 1},
    "refuse_health": {"duration_s": 0.0},
    "orphans": {},
    "slow": {"factor": 10.0},
    "release_nothing": {"count": 0},
    "wake_fails": {"status": 500, "count": 0},
    "wake_slow": {"seconds": 1.0},
    "weights_fail": {"status": 500, "count": 0},
    "weights_slow": {"seconds": 1.0},
    "pull_hangs": {"count": 0},
    "kv_dropped": {"count": 0},
}
_START_ONLY = ("slow_start", "fail_start")


class FaultError(ValueError):
    """A fault that does not exist or has a wrong value; the text names both."""


@dataclass(slots=True, eq=False)
class Fault:
    """One fault with every value filled in. `left`: how many more streams it hits, None without limit."""

    kind: str
    values: dict[str, float | str]
    left: int | None = None
    armed_at_tokens: int = 0

    def number(self, name: str) -> float:
        """A numeric value by name."""
        value = self.values[name]
        assert not isinstance(value, str)
        return value

    def whole(self, name: str) -> int:
        """A whole number by name."""
        return int(self.number(name))


def make_fault(fields: Mapping[str, object], *, at_start: bool) -> Fault:
    """A fault from `{"kind": ..., ...}`; FaultError when it is none."""
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise FaultError(f"fault kind {kind!r} does not exist; use one of {', '.join(_FIELDS)}")
    if kind in _START_ONLY and not at_start:
        raise FaultError(f"fault {kind} works at start only: pass it as --fault")
    values = dict(_FIELDS[kind])
    for name, value in fields.items():
        if name == "kind":
            continue
        if name not in values:
            raise FaultError(f"fault {kind} has no value {name!r}; it has {', '.join(values) or 'none'}")
        if isinstance(values[name], str):
            values[name] = str(value)
        else:
            try:
                values[name] = float(str(value))
            except ValueError:
                raise FaultError(f"fault {kind}: {name}={value!r} must be a number") from None
    if values.get("scope") not in (None, "process", "engine"):
        raise FaultError(f"fault hang: scope={values['scope']!r} must be process or engine")
    count = int(float(values.get("count", 0)))
    return Fault(kind, values, left=count or None)


def parse_fault(text: str) -> Fault:
    """A fault from its command-line form `kind,key=value,...`."""
    kind, *pairs = text.split(",")
    fields: dict[str, object] = {"kind": kind}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise FaultError(f"fault {text!r}: {pair!r} must be key=value")
        fields[name] = value
    return make_fault(fields, at_start=True)


@dataclass(slots=True)
class FaultBoard:
    """The faults in force."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        """Put a fault in force."""
        self.faults.append(fault)

    def clear(self) -> None:
        """Lift every fault (orphans and crashes that happened stay)."""
        self.faults.clear()

    def remove(self, fault: Fault) -> None:
        """Lift one fault, if it is still in force."""
        if fault in self.faults:
            self.faults.remove(fault)

    def get(self, kind: str) -> Fault | None:
        """The first fault of a kind in force."""
        return next((fault for fault in self.faults if fault.kind == kind), None)

    def claim(self, kind: str) -> Fault | None:
        """The same, counting one stream against it; spent faults are lifted."""
        fault = self.get(kind)
        if fault is not None and fault.left is not None:
            fault.left -= 1
            if fault.left <= 0:
                self.remove(fault)
        return fault

    def due_by_tokens(self, tokens_total: int) -> list[Fault]:
        """Crashes and hangs that wait for a number of tokens which has now been reached; they are lifted."""
        due = [
            fault
            for fault in self.faults
            if fault.kind in ("crash", "hang")
            and fault.whole("after_tokens") > 0
            and tokens_total - fault.armed_at_tokens >= fault.whole("after_tokens")
        ]
        for fault in due:
            self.remove(fault)
        return due

    def describe(self) -> list[dict[str, object]]:
        """The faults in force as JSON."""
        return [{"kind": fault.kind, **fault.values, "left": fault.left} for fault in self.faults]
