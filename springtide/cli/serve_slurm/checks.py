"""What can be asked of SLURM before anything starts."""

import socket
import subprocess

from springtide.cli.serve_slurm.options import ServeOptions
from springtide.errors import InvalidArgument

TIMEOUT_S = 15.0
_HERE = {"localhost", "127.0.0.1", "::1"}


def check_reachable(o: ServeOptions) -> None:
    """SLURM answers, and jobs on its nodes can reach the control plane. Raises InvalidArgument."""
    command = ["sinfo", "--noheader", "--Node", "--format=%o"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_slurm(str(error)) from None
    if said.returncode != 0:
        raise _no_slurm(said.stderr.strip() or f"exit code {said.returncode}")
    here = _HERE | {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    elsewhere = sorted(set(said.stdout.split()) - here)
    if o.loopback and elsewhere and not o.advertise_host:
        shown = ", ".join(elsewhere[:3]) + (", ..." if len(elsewhere) > 3 else "")
        raise InvalidArgument(
            field="--host",
            value=o.host,
            problem=f"cannot be reached by jobs on other hosts ({shown})",
            remedy="Give --host ADDRESS (0.0.0.0: all of them), with TLS files and tokens or with --trusted-network.",
        )


def _no_slurm(problem: str) -> InvalidArgument:
    return InvalidArgument(
        field="PATH", value="sinfo", problem=f"does not answer: {problem}", remedy="Run it where sbatch works."
    )
