"""`springtide serve-slurm`: a model on as many SLURM nodes as there are to be had, behind one address."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _text(*names: str, help: str, **more: Any) -> Callable[[Any], Any]:  # noqa: A002 - click's own word
    return click.option(*names, default=None, help=help, **more)


_OPTIONS = (
    _text("--model", metavar="MODEL", help="Directory, or a name that the engine can fetch."),
    _text("--engine", help="vllm, sglang; oss (vLLM with gpt-oss); llamacpp, sim.  [vllm]"),
    _text("--config", "config", type=click.Path(dir_okay=False, path_type=Path), help="JSON; flags go before it."),
    _text("--partition", help="sbatch --partition."),
    _text("--qos", help="sbatch --qos."),
    _text("--account", help="sbatch --account."),
    _text("--constraint", help="sbatch --constraint."),
    _text("--time-limit", help="sbatch --time.  [72:00:00]"),
    _text("--exclusive/--no-exclusive", help="Whole nodes.  [exclusive]"),
    _text("--slurm-extra", metavar="'--A=1;--B'", help="More sbatch options, separated by semicolons."),
    _text("--max-nodes", type=int, help="Most nodes.  [16]"),
    _text("--gpus-per-node", type=int, help="[8]"),
    _text("--tensor-parallel-size", "--tp", type=int, help="GPUs of one worker.  [1]"),
    _text("--gpu-memory-utilization", type=float, help="[0.90]"),
    _text("--max-model-len", type=int, help="[the engine's]"),
    _text("--served-model-name", help="`model` of requests.  [MODEL]"),
    _text("--engine-extra-args", metavar="'ARGS'", help="More of the engine's flags."),
    _text("--enable-prefix-caching/--no-prefix-caching", "enable_prefix_caching", help="[the engine's]"),
    _text("--reasoning-effort", help="low, medium or high, for models whose chat template knows it."),
    _text("--trust-remote-code", is_flag=True, help="Let the engine run code that comes with the model."),
    _text("--conda-env", help="Conda environment of the engine on the nodes."),
    _text("--venv-path", help="Virtual environment of the engine on the nodes."),
    _text("--project-root", help="Folder that jobs start in."),
    _text("--log-dir", help="Folder of the jobs' output.  [logs]"),
    _text("--port", type=click.IntRange(0, 65535), help="OpenAI API.  [8780]"),
    _text("--host", help="Address to listen on.  [127.0.0.1; jobs on other hosts need another one]"),
    _text("--worker-base-port", type=click.IntRange(1, 65472), help="First port of a node's workers.  [any free]"),
    _text("--heartbeat-timeout", type=float, help="Seconds of silence after which a node's workers are lost."),
    _text("--health-check-interval", type=float, help="Seconds between probes of an engine."),
    _text("--node-acquire-interval", type=float, help="Seconds between two looks at SLURM."),
    _text("--policy", help="greedy: all nodes at once; else a scaling policy, and nodes follow load.  [greedy]"),
    _text("--min-workers", type=int, help="Fewest workers of a scaling policy.  [0]"),
    _text("--advertise-host", help="Name under which jobs and clients reach this host."),
    _text("--advertise-file", type=click.Path(dir_okay=False), help="File to write the address to."),
    _text("--controlplane-port", type=click.IntRange(0, 65535), help="[7400]"),
    _text("--router-port", type=click.IntRange(0, 65535), help="gRPC.  [7500]"),
    _text("--pool", help="Name of the pool.  [of the model]"),
    _text("--notice-s", type=int, help="Seconds of warning before the time limit.  [60]"),
    _text("--preempt-grace-s", type=int, help="Seconds that a preemption leaves.  [30]"),
    _text("--preamble", help="Shell lines at each job's start, e.g. 'module load cuda'."),
    _text("--requeue/--no-requeue", help="Let SLURM requeue preempted jobs.  [no-requeue]"),
    _text("--simulated-gpus", is_flag=True, help="Count the GPUs that SLURM gives, do not look at them."),
    _text("--provisioner-id", help="Stable name: its jobs are found again by it.  [slurm]"),
    _text("--trusted-network", is_flag=True, help="Listen on --host; without TLS files for everybody there."),
    _text("--tls-cert", type=click.Path(), help="PEM file."),
    _text("--tls-key", type=click.Path(), help="PEM file."),
    _text("--tls-ca", type=click.Path(), help="PEM file that verifies it, as all nodes see it."),
    _text("--token-file", type=click.Path(), help="Accepted tokens, one a line."),
    _text("--log-level", help="[info]"),
)


def _all_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("serve-slurm")
@_all_options
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="[~/.local/share/springtide-slurm]")
@click.option("--release-on-exit", is_flag=True, help="Cancel its jobs at the end. Otherwise they stay.")
@click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing.")
def serve_slurm(data_dir: Path | None, release_on_exit: bool, dry_run: bool, config: Path | None, **flags: Any) -> None:
    """Serve a model on SLURM nodes behind one OpenAI address, in the foreground.

    Nodes are acquired up to --max-nodes, and preempted ones are replaced. `springtide slurm target N` changes the
    number while it runs. Ctrl-C stops it; its jobs stay and are found again, unless --release-on-exit is given.
    """
    from springtide.cli.exits import Exit, exit_code, show_error
    from springtide.cli.serve_slurm.checks import check_reachable
    from springtide.cli.serve_slurm.options import default_data_dir, plan, read_options
    from springtide.cli.serve_slurm.stack import SlurmStack
    from springtide.cli.up.run import run
    from springtide.errors import InvalidArgument, SpringtideError

    folder = (data_dir or default_data_dir()).expanduser().absolute()
    try:
        options = read_options(config, flags)
        decided = plan(options, folder)
        if dry_run:
            _show(decided)
            sys.exit(Exit.OK)
        check_reachable(options)
        _show_to_ourselves(options)
        (folder / "provisioner").mkdir(parents=True, exist_ok=True, mode=0o700)
        code = run(decided, lambda _, screen: SlurmStack(decided, screen, release=release_on_exit))
    except SpringtideError as error:
        show_error(error, as_json=False)
        wrong = isinstance(error, InvalidArgument) or error.reason == "CONFIGURATION_REFUSED"
        code = Exit.USAGE if wrong else exit_code(error)
    sys.exit(code)


def _show_to_ourselves(options: Any) -> None:
    """What our own processes show to the control plane is what it asks for; an operator's own settings go first."""
    if options.token_file and not os.environ.get("SPRINGTIDE_TOKEN"):
        os.environ.setdefault("SPRINGTIDE_TOKEN_FILE", str(Path(options.token_file).expanduser().absolute()))
    if options.tls_ca:
        os.environ.setdefault("SPRINGTIDE_TLS_CA", str(Path(options.tls_ca).expanduser().absolute()))


def _show(decided: Any) -> None:
    from springtide.cli.serve_slurm import configs
    from springtide.cli.serve_slurm.stack import table
    from springtide.cli.shape import dump
    from springtide.cli.up.configs import Ports

    o = decided.serve
    for line in table(o.gpus_per_node, o.max_nodes, o.tensor_parallel_size):
        click.echo(line)
    click.echo(dump(decided.pool_spec()))
    for module, content in configs.all_of(decided, Ports.asked(decided.options)).items():
        click.echo(f"# {module}.toml\n{content}")
