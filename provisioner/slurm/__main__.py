"""`python -m provisioner.slurm jobs|cancel --config provisioner.toml`: lists the jobs of a provisioner, or ends them.

For the end of a deployment, while its provisioner does not run. Exit code 0 when it is done, 1 when SLURM does not say.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from provisioner.config import read_config
from provisioner.context import ProviderContext
from provisioner.core.provider import OutcomeUnknown, Phase
from provisioner.slurm.provider import SlurmProvider
from provisioner.slurm.settings import SlurmSettings
from springtide.config import parse
from springtide.errors import SpringtideError


def main() -> int:
    parser = argparse.ArgumentParser(prog="provisioner.slurm", description=__doc__)
    parser.add_argument("action", choices=("jobs", "cancel"))
    parser.add_argument("--config", required=True, metavar="FILE.toml", help="of the provisioner")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for the jobs' ends")
    given = parser.parse_args()
    try:
        loaded = read_config(["--config", given.config])
        folder = Path(loaded.data_dir).resolve() / "provider"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        context = ProviderContext(loaded.provisioner_id, folder, loaded.agent_controlplane)
        provider = SlurmProvider(parse(SlurmSettings, loaded.provider, "provider."), context)
    except (SpringtideError, OSError) as error:
        print(f"provisioner.slurm: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_jobs(provider) if given.action == "jobs" else _cancel(provider, given.timeout_s))


async def _jobs(provider: SlurmProvider) -> int:
    try:
        nodes = await provider.list()
    except OutcomeUnknown as error:
        print(error, file=sys.stderr)
        return 1
    for node in nodes:
        print("  ".join(filter(None, (node.reference, node.phase.value, node.node_id, node.reason, node.message))))
    return 0


async def _cancel(provider: SlurmProvider, timeout_s: float) -> int:
    """Again and again until none lives: one may just have been submitted."""
    deadline = time.monotonic() + timeout_s
    cancelled = set[str]()
    live: list[str] = []
    words = ""
    while time.monotonic() < deadline:
        try:
            cancelled.update(await provider.cancel_all())
            live = [node.reference for node in await provider.list() if node.phase is not Phase.ENDED]
            if not live:
                print(f"{len(cancelled)} jobs cancelled." if cancelled else "There is no job.")
                return 0
        except OutcomeUnknown as error:
            words = str(error)
        await asyncio.sleep(1.0)
    print(f"Jobs that still live: {', '.join(live) or 'unknown'}. {words}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
