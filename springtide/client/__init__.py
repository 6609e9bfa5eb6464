"""Springtide from Python: `AsyncSpringtide`, and `Springtide` for code without an event loop.

    with Springtide() as springtide:
        for event in springtide.generate("demo", chat="What is the capital of France?"):
            if isinstance(event, Tokens):
                print(event.text, end="")
        springtide.scale("demo", 3)

Answers are the messages of the protos (springtide.v1), typed; errors are those of springtide.errors.
"""

from springtide.client.asynchronous import AsyncSpringtide, Event
from springtide.client.spec import pool_spec
from springtide.client.synchronous import Springtide
from springtide.v1.generation_pb2 import Finished, Started, Tokens

__all__ = ["AsyncSpringtide", "Event", "Finished", "Springtide", "Started", "Tokens", "pool_spec"]
