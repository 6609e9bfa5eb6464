"""generate: one answer, streamed to the terminal."""

import sys
import time

import click

from springtide.cli.invocation import Invocation, command
from springtide.errors import InvalidArgument
from springtide.v1.generation_pb2 import Finished, Started, Tokens


@click.command()
@click.argument("text")
@click.option("--pool", default="", help="Pool or served model; the only one there is unless given.")
@click.option("--chat/--completion", default=True, help="With the chat template (default), or the text as it is.")
@click.option("--system", default="", help="System message, for --chat.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=None, help="The engine's default unless given.")
@click.option("--seed", type=int, default=None)
@click.option("--stop", multiple=True, help="Stop before this text; may be repeated.")
@click.option("--stats", is_flag=True, help="Worker, times and tokens on stderr at the end.")
@command
async def generate(
    invocation: Invocation,
    text: str,
    pool: str,
    chat: bool,
    system: str,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    stats: bool,
) -> None:
    """Stream one answer to TEXT (- reads stdin) from a pool's active workers."""
    if text == "-":
        text = sys.stdin.read()
    client = invocation.client
    messages = [{"role": "system", "content": system}] if system else []
    source = client.generate(
        pool or await _only_pool(invocation),
        None if chat else text,
        chat=[*messages, {"role": "user", "content": text}] if chat else None,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop,
    )
    began = time.monotonic()
    first_at: float | None = None
    started, finished, pieces = Started(), Finished(), []
    async for event in source:
        if isinstance(event, Tokens):
            first_at = first_at or time.monotonic()
            pieces.append(event.text)
            if not invocation.as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        elif isinstance(event, Started):
            started = event
        else:
            finished = event
    answer = {
        "text": "".join(pieces),
        "finish_reason": finished.finish_reason,
        "prompt_tokens": finished.prompt_tokens if finished.HasField("prompt_tokens") else None,
        "completion_tokens": finished.completion_tokens if finished.HasField("completion_tokens") else None,
        "request_id": started.request_id,
        "worker_id": started.worker_id,
        "attempts": started.attempts,
        "waited_s": started.waited_s,
        "first_token_s": round(first_at - began, 6) if first_at else None,
        "total_s": round(time.monotonic() - began, 6),
    }
    invocation.show(answer, "")
    if stats:
        shown = ("worker_id", "attempts", "waited_s", "first_token_s", "total_s", "completion_tokens", "finish_reason")
        invocation.progress("  ".join(f"{key}={answer[key]}" for key in shown))


async def _only_pool(invocation: Invocation) -> str:
    names = [model.name for model in await invocation.client.models()]
    if len(names) == 1:
        return names[0]
    remedy = (
        f"Choose one of {', '.join(names)} with --pool." if names else "Create a pool first: `springtide apply FILE`."
    )
    raise InvalidArgument(
        field="pool", value=None, problem=f"is needed: the router serves {len(names)} models", remedy=remedy
    )
