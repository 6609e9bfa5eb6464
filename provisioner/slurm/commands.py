"""sbatch, squeue and scancel as subprocesses: bounded in time, ended when they hang, their words kept."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence

from provisioner.core.provider import OutcomeUnknown, Refused

_WORDS = 400
_MAY_HAVE_WORKED = (
    "timed out",
    "unable to contact",
    "connection",
    "communication",
    "zero bytes",
    "transport",
    "try again",
)
"""sbatch fails with one of these (in lower case: SLURM's versions differ in it) when its order may have reached
slurmctld, or when slurmctld is away for now."""


class CommandFailed(Exception):
    """It ended with another code than 0; `words` is what it said."""

    def __init__(self, command: str, code: int, words: str) -> None:
        super().__init__(f"{command} ended with {code}: {words or 'it said nothing'}")
        self.code = code
        self.words = words


async def run(
    command: Sequence[str], timeout_s: float, *, stdin: str = "", env: Mapping[str, str] | None = None
) -> str:
    """Its stdout. Raises CommandFailed, and OutcomeUnknown when it does not end in time or cannot be started.

    slurmctld's clients retry for minutes when it is away: one that is late is killed with all that it started.
    """
    name = command[0].rpartition("/")[2]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise OutcomeUnknown(f"{command[0]} cannot be started: {error}.") from None
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin.encode() or None)
    except TimeoutError:
        raise OutcomeUnknown(f"{name} did not answer within {timeout_s:g} s.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
    if process.returncode != 0:
        raise CommandFailed(name, process.returncode or 0, _words(err or out))
    return out.decode(errors="replace")


def submission_error(error: CommandFailed) -> Exception:
    """What a failed sbatch means: refused for sure, or not known."""
    if any(sign in error.words.lower() for sign in _MAY_HAVE_WORKED):
        return OutcomeUnknown(str(error))
    return Refused("WORKER_GROUP_TOO_MUCH", str(error))


def _words(raw: bytes) -> str:
    lines = [line.strip() for line in raw[-8192:].decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines)[-_WORDS:]
