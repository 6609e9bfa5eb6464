"""Starters of the processes: `springtide router ...` becomes `python -m router ...`."""

import os
import sys
from pathlib import Path

import click

import springtide

_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def module_command(module: str) -> list[str]:
    """How one of our processes is started. An installed one never looks into the folder that it is started in."""
    installed = "site-packages" in Path(springtide.__file__).parts
    return [sys.executable, *(["-P"] if installed else []), "-m", module]


def _become(module: str, arguments: tuple[str, ...]) -> None:
    root = str(Path(springtide.__file__).resolve().parents[1])
    if "site-packages" not in root and root != str(Path.cwd()):
        # A source tree that is not installed: its processes are found beside this package.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [*module_command(module), *arguments]
    os.execv(command[0], command)


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def controlplane(arguments: tuple[str, ...]) -> None:
    """Run a control plane; ARGUMENTS go to it (--help lists them)."""
    _become("controlplane", arguments)


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def nodeagent(arguments: tuple[str, ...]) -> None:
    """Run a node agent; ARGUMENTS go to it (--help lists them)."""
    _become("nodeagent", arguments)


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def provisioner(arguments: tuple[str, ...]) -> None:
    """Run a provisioner; ARGUMENTS go to it (--help lists them)."""
    _become("provisioner", arguments)


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def router(arguments: tuple[str, ...]) -> None:
    """Run a router; ARGUMENTS go to it (--help lists them)."""
    _become("router", arguments)


@click.command(context_settings=_SETTINGS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ray(arguments: tuple[str, ...]) -> None:
    """Run or extend a Ray cluster of this host; ARGUMENTS go to it (--help lists them)."""
    _become("provisioner.ray", arguments)
