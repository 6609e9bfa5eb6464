"""Do launch lines pass the real vLLM's parser? See argument_check.py for how to ask and what is answered.

    .venv-vllm/bin/python tests/engines_real/check_vllm_args.py serve MODEL_DIR --tensor-parallel-size 2 ...

A line starts with "serve", as after `vllm`. MODEL_DIR must exist: without network vLLM refuses a model that it would
have to look up. What depends on the device is checked by vLLM only when it starts.
"""

import argparse
import os
import sys

import argument_check

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def load() -> argument_check.Engine:
    """The list of commands is imported, not the list of options, whose module moves with nearly every release."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    commands = {command.name: command for command in serve.cmd_init()}
    for command in commands.values():
        command.subparser_init(subparsers)

    def validate(options: argparse.Namespace) -> None:
        if getattr(options, "model_tag", None):
            options.model = options.model_tag
        commands["serve"].validate(options)
        AsyncEngineArgs.from_cli_args(options)

    return argument_check.Engine(parser, validate, vllm.__version__)


if __name__ == "__main__":
    sys.exit(argument_check.main(load))
