"""Fixtures: a fake stack, and the command line run against it in this process."""

import pytest
from click.testing import CliRunner

from springtide.cli.root import springtide
from tests.cli import fakes


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
