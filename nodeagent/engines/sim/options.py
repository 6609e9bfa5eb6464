"""Command line of the simulated engine: vLLM's names where vLLM has the option, own names for the model of time."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from nodeagent.engines.sim.batching import Timing
from nodeagent.engines.sim.faults import Fault, parse_fault
from nodeagent.engines.sim.kv import KvConfig, parse_config


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Everything the process was told at its start."""

    host: str
    port: int
    uds: str | None
    port_file: str | None
    served_model_names: tuple[str, ...]
    seed: int
    max_model_len: int
    tensor_parallel_size: int
    timing: Timing
    startup_s: float
    shutdown_timeout_s: float
    natural_length: int
    dev_mode: bool
    memory_bytes: int
    sleep_mode: bool
    faults: tuple[Fault, ...]
    kv: KvConfig | None = None
    """None: no connector, `kv_transfer_params` mean nothing."""


def build_parser() -> argparse.ArgumentParser:
    """The parser; unknown flags are errors, as with the real engines."""
    defaults = Timing()
    parser = argparse.ArgumentParser(prog="nodeagent.engines.sim", description=__doc__, allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?", help="name of the pretended model; same as --model")
    parser.add_argument("--model", default=None)
    parser.add_argument("--served-model-name", nargs="+", default=None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one; see --port-file")
    parser.add_argument("--uds", default=None, help="listen on this unix socket instead")
    parser.add_argument("--port-file", default=None, help="write the bound port here once listening")
    parser.add_argument("--seed", type=int, default=0, help="accepted for parity; answers do not depend on it")
    parser.add_argument("--max-model-len", type=int, default=None, help="default: 16384, or the KV capacity if less")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0, help="seconds to drain after SIGTERM")
    parser.add_argument("--enable-sleep-mode", action="store_true", help="the default here; accepted for parity")
    parser.add_argument("--no-sleep-mode", action="store_true", help="as a vLLM without --enable-sleep-mode")
    parser.add_argument(
        "--memory-mb", type=float, default=16.0, help="MiB that it holds, half of it weights; a sleep gives it back"
    )
    parser.add_argument("--no-dev-mode", action="store_true", help="no sleep, pause, abort and cache routes (404)")
    parser.add_argument(
        "--natural-length",
        type=int,
        default=0,
        help="answers end by themselves (finish_reason stop) after this many tokens; "
        "0: only those end so (after 128) that name no max_tokens",
    )
    parser.add_argument(
        "--kv-transfer-config",
        default=None,
        metavar="JSON",
        help="as vLLM's: kv_connector, kv_load_failure_policy (fail, recompute) and, in kv_connector_extra_config, "
        "kv_lease_duration; prompts computed here are decoded elsewhere, and the other way round",
    )
    time = parser.add_argument_group("model of time")
    time.add_argument("--startup-s", type=float, default=0.2, help="seconds before it listens")
    time.add_argument("--prefill-tokens-per-s", type=float, default=defaults.prefill_tokens_per_s)
    time.add_argument("--decode-base-ms", type=float, default=defaults.decode_base_s * 1000)
    time.add_argument("--decode-per-request-ms", type=float, default=defaults.decode_per_request_s * 1000)
    time.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    time.add_argument("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens)
    time.add_argument("--block-size", type=int, default=defaults.block_size)
    time.add_argument("--num-gpu-blocks-override", type=int, default=defaults.kv_blocks, help="KV capacity in blocks")
    time.add_argument("--timing-scale", type=float, default=1.0, help="multiplies durations: 0.1 is ten times faster")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[,key=value...]",
        help="inject a fault at start, e.g. crash,after_tokens=100,exit_code=3 (repeatable; kinds in faults.py)",
    )
    return parser


def parse_options(argv: Sequence[str]) -> SimOptions:
    """Options from argv; exits with 2 and one line on stderr when they make no sense."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    for name in ("prefill_tokens_per_s", "timing_scale"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name)}")
    if not 0 <= args.memory_mb <= 1 << 20:
        parser.error(f"--memory-mb must be between 0 and {1 << 20}, not {args.memory_mb:g}")
    kv_tokens = args.num_gpu_blocks_override * args.block_size
    max_model_len = min(16384, kv_tokens) if args.max_model_len is None else args.max_model_len
    if not 2 <= max_model_len <= kv_tokens:
        parser.error(
            f"--max-model-len {max_model_len} must be between 2 and the KV capacity of {kv_tokens} tokens; "
            "raise --num-gpu-blocks-override or lower --max-model-len"
        )
    try:
        faults = tuple(parse_fault(text) for text in args.fault)
        kv = None if args.kv_transfer_config is None else parse_config(args.kv_transfer_config)
    except ValueError as error:
        parser.error(str(error))
    model = args.model_tag or args.model or "sim"
    return SimOptions(
        host=args.host,
        port=args.port,
        uds=args.uds,
        port_file=args.port_file,
        served_model_names=tuple(args.served_model_name or [model]),
        seed=args.seed,
        max_model_len=max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        timing=Timing(
            prefill_tokens_per_s=args.prefill_tokens_per_s,
            decode_base_s=args.decode_base_ms / 1000,
            decode_per_request_s=args.decode_per_request_ms / 1000,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_blocks=args.num_gpu_blocks_override,
            block_size=args.block_size,
            scale=args.timing_scale,
        ),
        startup_s=args.startup_s * args.timing_scale,
        shutdown_timeout_s=args.shutdown_timeout,
        natural_length=args.natural_length,
        memory_bytes=int(args.memory_mb * 1024 * 1024),
        sleep_mode=not args.no_sleep_mode,
        dev_mode=not args.no_dev_mode and os.environ.get("VLLM_SERVER_DEV_MODE", "1") != "0",
        faults=faults,
        kv=kv,
    )
