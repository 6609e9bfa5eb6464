"""Asks squeue for the jobs of one provisioner: as JSON, and in plain lines of a version that does not know it."""

import logging
import os
import pwd
from collections.abc import Callable

from provisioner.core.provider import OutcomeUnknown
from provisioner.slurm import commands
from provisioner.slurm.jobs import FORMAT, Job, from_json, from_text

log = logging.getLogger(__name__)

_JSON_TRIES = 3  # after so many failures in a row only the plain form is asked for


class Squeue:
    """`clock`: seconds since the epoch. Our user's name is resolved once, here: a directory service may be slow.

    squeue refuses a uid without a name, as containers have it: then all jobs are asked for, and ours are told apart by
    the uid.
    """

    def __init__(self, provisioner_id: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._id = provisioner_id
        self._timeout_s = timeout_s
        self._clock = clock
        self._json_failures = 0
        self._uid = os.getuid()
        self._user = _name_of(self._uid)

    async def jobs(self) -> list[Job]:
        """All that slurmctld remembers, ended ones too. Raises OutcomeUnknown."""
        try:
            if self._json_failures < _JSON_TRIES:
                try:
                    jobs = await self._json()
                    self._json_failures = 0
                    return jobs
                except (commands.CommandFailed, ValueError, KeyError, TypeError) as error:
                    log.warning("squeue --json is not understood, its plain form is read instead: %s", error)
            jobs = await self._plain()
            self._json_failures += 1
            return jobs
        except commands.CommandFailed as error:
            raise OutcomeUnknown(str(error)) from None
        except ValueError as error:
            raise OutcomeUnknown(f"squeue is not understood: {error}") from None

    async def _json(self) -> list[Job]:
        said = await commands.run(["squeue", "--json", *self._which()], self._timeout_s)  # 22.05 shows all jobs even so
        return from_json(said, self._id, self._clock(), self._of_uid)

    async def _plain(self) -> list[Job]:
        command = ["squeue", "--noheader", *self._which(), f"--format={FORMAT}"]
        return from_text(await commands.run(command, self._timeout_s), self._id, self._of_uid)

    def _which(self) -> tuple[str, ...]:
        """Ended jobs, too, of our user."""
        return ("--states=all", f"--user={self._user}") if self._user else ("--states=all",)

    @property
    def _of_uid(self) -> int | None:
        """None: squeue itself leaves out the jobs of others."""
        return None if self._user else self._uid


def _name_of(uid: int) -> str:
    """Empty: it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        log.warning("uid %d has no name: squeue is asked for the jobs of all users", uid)
        return ""
