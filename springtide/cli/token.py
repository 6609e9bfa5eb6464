"""Join tokens: `springtide token create`."""

import click

from springtide.cli import text
from springtide.cli.invocation import Duration, Invocation, command
from springtide.cli.shape import plain


@click.group()
def token() -> None:
    """Make the secret that lets a provisioner in over a network."""


@token.command()
@click.option("--provisioner", "provisioner_id", required=True, metavar="ID", help="Its id; the token is for no other.")
@click.option(
    "--for", "valid_for_s", type=Duration(), default=86_400.0, help="How long; 24h unless given, at most 366d."
)
@command
async def create(invocation: Invocation, provisioner_id: str, valid_for_s: float) -> None:
    """Print a join token. Give it to the provisioner as SPRINGTIDE_TOKEN, or in a file named by
    SPRINGTIDE_TOKEN_FILE: never on a command line.

    \b
    springtide token create --provisioner hpc --for 24h > hpc.token
    """
    made = await invocation.client.create_token(provisioner_id, valid_for_s=valid_for_s)
    click.echo(f"for provisioner {provisioner_id}, for {text.duration(valid_for_s)}", err=True)
    invocation.show(plain(made), made.token)
