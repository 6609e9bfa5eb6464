"""apply and delete: pools from a file, checked as a whole before the first one changes."""

import json
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from springtide.cli import text
from springtide.cli.invocation import Invocation, command
from springtide.cli.operate import bound_option, wait_option
from springtide.cli.shape import plain
from springtide.cli.waiting import until
from springtide.client.spec import pool_spec
from springtide.errors import InvalidArgument, NotFound
from springtide.v1.types_pb2 import Pool, PoolSpec


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--dry-run", is_flag=True, help="Check only; change nothing.")
@command
async def apply(invocation: Invocation, file: str, dry_run: bool) -> None:
    """Create or change the pools in FILE: TOML or JSON with a list `pools`; - reads stdin.

    All pools are checked before the first one changes. A pool that is not in FILE is left as it is.
    """
    specs = read_pools(file)
    for spec in specs:
        await invocation.client.apply(spec, validate_only=True)
    rows, answers = [], []
    for spec in specs:
        pool, created = await invocation.client.apply(spec, validate_only=dry_run)
        done = "checked" if dry_run else "created" if created else "updated"
        rows.append((spec.name, done, spec.engine, f"{pool.spec.min_workers}-{pool.spec.max_workers}"))
        answers.append({"pool": plain(pool), "result": done})
    invocation.show(answers, text.table(("POOL", "RESULT", "ENGINE", "MIN-MAX"), rows))


@click.command()
@click.argument("pool")
@click.option("--drain", is_flag=True, help="Drain and stop its workers first.")
@wait_option
@bound_option
@command
async def delete(invocation: Invocation, pool: str, drain: bool, wait: bool, bound_s: float) -> None:
    """Delete POOL. Refused while it has workers, unless --drain is given."""
    await invocation.client.delete(pool, drain=drain)

    async def find() -> Pool | None:
        try:
            return await invocation.client.pool(pool)
        except NotFound:
            return None

    def shown(found: Pool | None) -> str:
        return f"{found.status.active} active, {found.status.draining} draining" if found else "gone"

    if wait:
        gone = await until(
            invocation,
            find,
            reached=lambda found: found is None,
            shown=shown,
            timeout_s=bound_s,
            target=f"The end of pool {pool}",
        )
        assert gone is None
    invocation.show(
        {"pool": pool, "result": "is deleted" if wait else "is being deleted"},
        f"pool {pool} is deleted" if wait else f"pool {pool} is being deleted",
    )


def read_pools(file: str) -> list[PoolSpec]:
    """The specs of a file. Raises InvalidArgument with the place in the file (`pools[1].min_workers`)."""
    plain_file = _parse(file, _read(file))
    for key in plain_file:
        if key != "pools":
            near = get_close_matches(key, ["pools"], n=1)
            remedy = "Did you mean pools?" if near else "The file holds a list `pools`: [[pools]] in TOML."
            raise InvalidArgument(
                field=key, value=_brief(plain_file[key]), problem="is not a key", remedy=remedy, reason="UNKNOWN_KEY"
            )
    entries = plain_file.get("pools")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgument(
            field="pools", value=_brief(entries), problem="must be a list of pools", remedy="Write [[pools]] for each."
        )
    specs = [pool_spec(entry, f"pools[{i}].") for i, entry in enumerate(entries)]
    for i, spec in enumerate(specs):
        if spec.name in {other.name for other in specs[:i]}:
            raise InvalidArgument(
                field=f"pools[{i}].name",
                value=spec.name,
                problem="is there twice",
                remedy="Give each pool a name of its own.",
            )
    return specs


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            field="FILE",
            value=file,
            problem=error.strerror or str(error),
            remedy="Name a readable file, or - for stdin.",
        ) from None


def _parse(file: str, content: bytes) -> dict[str, Any]:
    try:
        # On stdin "[[" begins a TOML table and "[{" a JSON list.
        as_json = file.endswith(".json") or (file == "-" and content.lstrip().startswith((b"{", b"[{", b"[ ", b"[\n")))
        parsed = json.loads(content) if as_json else tomllib.loads(content.decode())
    except ValueError as error:  # JSONDecodeError, TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise InvalidArgument(field="FILE", value=file, problem=str(error), remedy="Correct the file.") from None
    return parsed if isinstance(parsed, dict) else {"pools": parsed}


def _brief(value: Any) -> str:
    return repr(value)[:80]
