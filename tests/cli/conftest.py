"""Fixtures: a fake stack, and the command line run against it in this process."""

import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from springtide.cli.root import springtide


def _load(name):
    spec = importlib.util.spec_from_file_location(f"cli_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load("fakes")


@pytest.fixture
def stack():
    with fakes.FakeStack() as running:
        yield running


@pytest.fixture
def cli(stack):
    """Runs a command line against the fakes; gives back click's result (exit_code, stdout, stderr)."""
    address, router = stack.addresses
    environ = {"SPRINGTIDE_ADDRESS": address, "SPRINGTIDE_ROUTER": router}

    def run(*arguments, env=None, stdin=None):
        return CliRunner().invoke(springtide, list(arguments), env=environ if env is None else env, input=stdin)

    return run
