"""`springtide up`: a whole system on this machine, in the foreground."""

import sys
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--engine", default="llamacpp", show_default=True, help="llamacpp, sim, vllm or sglang.")
@click.option("--model", metavar="MODEL", help="Directory, file or package:NAME [llamacpp: a small chat model].")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs of one worker.")
@click.option("--gpus", type=click.IntRange(min=1), help="Simulated GPU slots, where there is no GPU [max x tp].")
@click.option("--min", "min_workers", type=click.IntRange(min=0), default=1, show_default=True, help="Fewest workers.")
@click.option("--max", "max_workers", type=click.IntRange(min=1), help="Most workers [3, or what the GPUs allow].")
@click.option("--policy", default="load_ratio", show_default=True, help="Scaling policy.")
@click.option("--pool", default="demo", show_default=True, help="Name of the pool.")
@click.option("--controlplane-port", type=click.IntRange(0, 65535), default=7400, show_default=True)
@click.option("--router-port", type=click.IntRange(0, 65535), default=7500, show_default=True)
@click.option("--http-port", type=click.IntRange(0, 65535), default=8780, show_default=True)
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="[~/.local/share/springtide]")
@click.option("--interpreter", default="", metavar="PYTHON", help="Of the environment that the engine is installed in.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="ARG", help="For the engine; may be repeated.")
@click.option("--metrics", is_flag=True, help="Prometheus endpoints on free ports.")
@click.option("--log-level", default="info", show_default=True, help="Of the three processes.")
def up(data_dir: Path | None, **given: Any) -> None:
    """Run a control plane, a node agent, a router and one pool on this machine, in the foreground.

    Ctrl-C stops everything; a second one kills what still runs. Several stacks run side by side when each has ports
    (0 takes free ones) and a --data-dir of its own. The same folder again continues with its pools and history.
    """
    from springtide.cli.exits import Exit, exit_code, show_error
    from springtide.cli.up.options import UpOptions, count_real_gpus, decide, default_data_dir
    from springtide.cli.up.run import run
    from springtide.errors import InvalidArgument, SpringtideError

    folder = (data_dir or default_data_dir()).expanduser().absolute()
    try:
        options = UpOptions(data_dir=folder, **given)
        code = run(decide(options, count_real_gpus()))
    except SpringtideError as error:
        show_error(error, as_json=False)
        wrong = isinstance(error, InvalidArgument) or error.reason == "CONFIGURATION_REFUSED"
        code = Exit.USAGE if wrong else exit_code(error)
    sys.exit(code)
