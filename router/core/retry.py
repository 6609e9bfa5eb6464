"""What follows from the end of an attempt: pass it on, try another worker, or answer an error. A pure table."""

from dataclasses import dataclass
from enum import Enum

from springtide.dataplane.messages import OutcomeKind
from springtide.quick_enum import quick


@quick
class Verdict(Enum):
    """What to do with the request."""

    PASS = "pass"  # the client has its answer, or nothing can be added to it
    REQUEUE = "requeue"  # the worker took nothing: elsewhere or wait, costs no attempt
    RETRY = "retry"  # the worker failed before the first token: on another one, costs an attempt
    CONTINUE = "continue"  # the stream was lost after it: goes on elsewhere from the tokens that the client has
    ERROR = "error"  # the client gets an error


@quick
class Blame(Enum):
    """What the worker's seat is told."""

    NOTHING = "nothing"
    SUCCESS = "success"
    FAILURE = "failure"
    REFUSAL = "refusal"


@dataclass(frozen=True, slots=True)
class Ruling:
    """`doubtful`: the fault may be the request's own; without another worker, the error is passed on after a pause."""

    verdict: Verdict
    blame: Blame
    doubtful: bool = False


SERVED = Ruling(Verdict.PASS, Blame.SUCCESS)
"""Of every attempt that gave the client its whole answer."""

_MAY_BE_THE_REQUESTS = {
    OutcomeKind.CONNECT_FAILED: False,
    OutcomeKind.UPSTREAM_EOF: False,
    OutcomeKind.TIMEOUT: True,
    OutcomeKind.ERROR_STATUS: True,
    OutcomeKind.UPSTREAM_ERROR_EVENT: True,
    OutcomeKind.BAD_RESPONSE: True,
}


def rule(
    kind: OutcomeKind,
    *,
    response_started: bool,
    refusal: str,
    timeout: str,
    attempts: int,
    max_attempts: int,
    fault: str = "",
    continuable: bool = False,
) -> Ruling:
    """Decides. `fault`: what a shim says of its engine in place of an answer of the engine's (an OutcomeKind's value).

    `attempts` counts workers that were really tried, the present one included; refusals do not count.

    RT5: before the first token another worker takes it unseen. After it, a `continuable` stream goes on elsewhere; else
    the client gets an explicit error.
    """
    if kind is OutcomeKind.OK:
        return SERVED
    if kind in (OutcomeKind.CLIENT_GONE, OutcomeKind.ABORTED):
        return Ruling(Verdict.PASS if response_started else Verdict.ERROR, Blame.NOTHING)
    if kind is OutcomeKind.REFUSED:
        return Ruling(Verdict.REQUEUE, Blame.REFUSAL)
    # The request's own patience ran out; a slow answer is not the worker's failure.
    blame = Blame.NOTHING if kind is OutcomeKind.TIMEOUT and timeout == "total" else Blame.FAILURE
    if response_started and fault == OutcomeKind.ABORTED.value:
        blame = Blame.NOTHING  # a drain's deadline
    lost = fault in (OutcomeKind.CONNECT_FAILED.value, OutcomeKind.UPSTREAM_EOF.value, OutcomeKind.ABORTED.value)
    doubtful = _MAY_BE_THE_REQUESTS.get(kind, True) and timeout != "connect" and not lost
    if response_started:
        return Ruling(Verdict.CONTINUE if continuable else Verdict.PASS, blame, doubtful)
    if timeout == "total" or attempts >= max_attempts:
        return Ruling(Verdict.ERROR, blame, doubtful)
    return Ruling(Verdict.RETRY, blame, doubtful)
