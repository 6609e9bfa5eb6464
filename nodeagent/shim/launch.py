"""What a shim is told at its start: `launch.json` in its folder."""

from pathlib import Path

from google.protobuf import json_format

from springtide.dataplane.messages import parse_address
from springtide.errors import InvalidArgument
from springtide.v1 import shim_pb2

LAUNCH_FILE = "launch.json"
EXIT_LAUNCH = 2
"""Exit code of a shim that cannot use its launch file."""
EXIT_NO_PORT = 3
"""Exit code of a shim that found no free port in its range."""


def read_launch(folder: Path) -> shim_pb2.ShimLaunch:
    """The launch of a shim. Raises InvalidArgument that names the file or the field."""
    path = folder / LAUNCH_FILE
    try:
        launch = json_format.Parse(path.read_bytes(), shim_pb2.ShimLaunch(), ignore_unknown_fields=True)
    except (OSError, json_format.ParseError) as error:
        raise InvalidArgument(
            field=LAUNCH_FILE, value=str(path), problem=str(error), remedy="The agent writes it."
        ) from None
    for name in ("worker_id", "argv", "engine_endpoint", "control_path", "engine_log_path", "max_in_flight"):
        if not getattr(launch, name):
            problem = f"is missing in {path}"
            raise InvalidArgument(field=name, value=None, problem=problem, remedy="The agent writes it.")
    try:
        parse_address(launch.engine_endpoint)
    except ValueError as error:
        raise InvalidArgument(
            field="engine_endpoint",
            value=launch.engine_endpoint,
            problem=str(error),
            remedy="Name HOST:PORT or unix:PATH.",
        ) from None
    return launch
