"""`python -m nodeagent.shim --dir DIR`: started by the agent, one per worker. Everything else is in DIR/launch.json."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from nodeagent.shim.launch import EXIT_LAUNCH, EXIT_NO_PORT, read_launch
from nodeagent.shim.service import NoPort, Shim
from springtide.errors import SpringtideError


def main() -> int:
    """Runs the shim; the exit code."""
    parser = argparse.ArgumentParser(prog="nodeagent.shim", description=__doc__)
    parser.add_argument("--dir", required=True, type=Path, help="folder of the worker, with launch.json")
    folder: Path = parser.parse_args().dir
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        launch = read_launch(folder)

        async def run() -> None:
            await Shim(launch, folder).run()

        uvloop.run(run())
    except NoPort as error:
        print(f"nodeagent.shim: {error}", file=sys.stderr)
        return EXIT_NO_PORT
    except (SpringtideError, OSError) as error:
        print(f"nodeagent.shim: {error}", file=sys.stderr)
        return EXIT_LAUNCH
    return 0


if __name__ == "__main__":
    sys.exit(main())
