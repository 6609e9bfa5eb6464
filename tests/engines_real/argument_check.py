"""What check_vllm_args.py and check_sglang_args.py share: read launch lines, try each, print what became of it.

Runs in the engine's environment, standard library only. Importing an engine takes many seconds: once for all lines.

    ... check_ENGINE_args.py OPTION...          one line
    ... check_ENGINE_args.py -  < lines.json    a JSON list of lines, each a list of arguments

Prints a JSON list with one object for each line: {"accepted": bool, "refused_by": null|"parser"|"validation",
"message": str, "version": str, "parsed": {option: value}}. Exit status 0 if all are accepted, else 1.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Engine(NamedTuple):
    """An engine's parser; `validate` raises for what the parser lets through; the engine's version."""

    parser: argparse.ArgumentParser
    validate: Callable[[argparse.Namespace], None]
    version: str


def refused(by: str, message: str) -> dict[str, Any]:
    return {"accepted": False, "refused_by": by, "message": message, "parsed": {}}


def check(engine: Engine, arguments: list[str]) -> dict[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = engine.parser.parse_args(arguments)
    except SystemExit:
        return refused("parser", said.getvalue().strip().rpartition("\n")[2])  # the usage stands before it
    try:
        engine.validate(options)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises here is its refusal
        return refused("validation", f"{type(error).__name__}: {error}")
    plain = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | bool)}
    return {"accepted": True, "refused_by": None, "message": "", "parsed": plain}


def main(load: Callable[[], Engine]) -> int:
    lines = json.load(sys.stdin) if sys.argv[1:] == ["-"] else [sys.argv[1:]]
    with contextlib.redirect_stdout(sys.stderr):  # what engines print at import is not the answer
        engine = load()
        results = [check(engine, line) | {"version": engine.version} for line in lines]
    print(json.dumps(results))
    return 0 if all(result["accepted"] for result in results) else 1
