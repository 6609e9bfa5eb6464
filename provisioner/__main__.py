"""`python -m provisioner`: gives nodes to the control plane and takes them back.

    python -m provisioner --kind KIND --id ID --controlplane HOST:PORT --config FILE.toml --data-dir DIR

KIND is local, static, slurm, ray, ecs, kubernetes, or the name of an entry point of the group
`springtide.provisioners`. Its module has one function:

    create(config: Mapping[str, Any], context: ProviderContext) -> Provider

`config` is the table [provider] of the file, whose keys the provider checks itself (springtide.config.parse does it
from a dataclass); `context` (provisioner.context) has the provisioner's id, a folder of the provider's own, the address
of the control plane for agents, their CA file and the clock. `create` runs before the event loop and may raise
SpringtideError: exit code 2 with one line. Provider is the protocol of provisioner.core.provider; the runner calls it
from one event loop, `start` and `stop` at most once at a time per group, `list` and `capability_sets` every
`poll_interval_s` and after each call. The environment has SPRINGTIDE_TOKEN (or SPRINGTIDE_TOKEN_FILE) and
SPRINGTIDE_TLS_CA where the control plane asks for them.

Exit code 0 after SIGTERM or SIGINT, 2 when it cannot start. Its nodes stay; the next process of the same id finds them.
"""

import asyncio
import sys

from provisioner.config import read_config
from provisioner.process import Provisioner
from springtide import telemetry
from springtide.errors import SpringtideError


def main() -> int:
    """Runs the provisioner; the exit code."""
    try:
        loaded = read_config()
        telemetry.setup("springtide-provisioner", level=loaded.log_level, instance_id=loaded.provisioner_id)

        async def run() -> None:
            await Provisioner(loaded).run()

        asyncio.run(run())
    except (SpringtideError, OSError) as error:
        print(f"provisioner: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
