"""What the agent's processes carry in their environment: whose they are, of which worker and of which incarnation."""

from collections.abc import Mapping

from springtide.processes import MARKER, ProcessIdentity, with_variable

WORKER = "SPRINGTIDE_WORKER"
INCARNATION = "SPRINGTIDE_INCARNATION"


def marked(marker: str) -> list[tuple[ProcessIdentity, Mapping[str, str]]]:
    """Live processes of this user that carry our marker, with their environment. Reads all of /proc."""
    return list(with_variable(MARKER, marker))
