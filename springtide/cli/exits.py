"""Exit codes, and how an error is shown."""

import json
import sys
from enum import IntEnum

from springtide.errors import FailedPrecondition, NotFound, SpringtideError, Unavailable


class Exit(IntEnum):
    """What the exit code of `springtide` means. Documented in docs/errors.md."""

    OK = 0
    REFUSED = 1  # the request was refused, or failed
    USAGE = 2  # wrong arguments, wrong configuration, port in use
    UNREACHABLE = 3  # no control plane or router answers
    NOT_FOUND = 4
    PRECONDITION = 5  # the state of the thing forbids it
    TIMED_OUT = 6  # --wait: the state was not reached in time
    INTERRUPTED = 130


class WaitTimedOut(SpringtideError):
    """The state that --wait waits for was not reached within its bound."""

    default_reason = "WAIT_TIMED_OUT"


def exit_code(error: SpringtideError) -> Exit:
    """The code that an error ends the command with."""
    if isinstance(error, WaitTimedOut):
        return Exit.TIMED_OUT
    if isinstance(error, NotFound):
        return Exit.NOT_FOUND
    if isinstance(error, FailedPrecondition):
        return Exit.PRECONDITION
    if isinstance(error, Unavailable) and error.reason.endswith(("_UNREACHABLE", "DEADLINE_EXCEEDED")):
        return Exit.UNREACHABLE
    return Exit.REFUSED


def show_error(error: SpringtideError, *, as_json: bool) -> None:
    """On stderr: what happened, and field, value and remedy each on a line of its own."""
    if as_json:
        body = {"reason": error.reason, "message": error.message, "exit_code": int(exit_code(error)), **error.details()}
        if error.retry_after_s is not None:
            body["retry_after_s"] = error.retry_after_s
        print(json.dumps({"error": body}), file=sys.stderr)
        return
    lines = [f"error: {error.message}"]
    details = error.details()
    if exit_code(error) is Exit.UNREACHABLE:
        details["or"] = "Set --address (SPRINGTIDE_ADDRESS) or --router (SPRINGTIDE_ROUTER); here: `springtide up`."
    lines += [f"  {key:<10} {value}" for key, value in (("reason", error.reason), *details.items())]
    if error.retry_after_s is not None:
        lines.append(f"  {'retry in':<10} {error.retry_after_s:.1f} s")
    print("\n".join(lines), file=sys.stderr)
