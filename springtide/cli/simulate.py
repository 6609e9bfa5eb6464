"""`springtide simulate ...` becomes `python -m simulator ...`."""

import click

from springtide.cli.processes import _SETTINGS, _become


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Simulate pools on a virtual clock; ARGUMENTS go to the simulator (--help lists them)."""
    _become("simulator", arguments)
