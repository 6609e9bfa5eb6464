"""`python -m nodeagent`: the agent of one node. Exit code 0 when it was told to leave, 2 when it cannot start."""

import asyncio
import sys

from nodeagent.agent import Agent
from nodeagent.config import read_config
from springtide import telemetry
from springtide.errors import SpringtideError


def main() -> int:
    """Runs the agent; the exit code."""
    try:
        loaded = read_config()
        telemetry.setup("springtide-nodeagent", level=loaded.log_level, instance_id=loaded.node_id)

        async def run() -> None:
            await Agent(loaded).run()

        asyncio.run(run())
    except (SpringtideError, OSError) as error:
        print(f"nodeagent: {error}", file=sys.stderr)
        return 2
    finally:
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
