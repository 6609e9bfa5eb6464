"""The group of all commands. Each is `module:function`, imported when it is asked for."""

import importlib
from typing import Any

import click

_COMMANDS = {
    "up": ("springtide.cli.up", "up", "Run a whole system on this machine, in the foreground."),
    "serve-slurm": ("springtide.cli.serve_slurm", "serve_slurm", "Serve a model on SLURM nodes, in the foreground."),
    "slurm": ("springtide.cli.serve_slurm.commands", "slurm", "Change a running serve-slurm: its number of nodes."),
    "status": ("springtide.cli.inspect", "status", "Pools, workers, nodes and routers at one revision."),
    "pools": ("springtide.cli.inspect", "pools", "List pools, or show one."),
    "workers": ("springtide.cli.inspect", "workers", "List workers, or show one."),
    "nodes": ("springtide.cli.inspect", "nodes", "List nodes."),
    "provisioners": ("springtide.cli.inspect", "provisioners", "List who gives nodes, and how many."),
    "models": ("springtide.cli.inspect", "models", "List the models that the router serves."),
    "health": ("springtide.cli.inspect", "health", "Ask control plane, router and pools whether they serve."),
    "decisions": ("springtide.cli.history", "decisions", "Show scaling decisions, newest first."),
    "events": ("springtide.cli.history", "events", "Show what happened, oldest first."),
    "explain": ("springtide.cli.explaining", "explain", "Say why a pool was scaled, or was not."),
    "preview": ("springtide.cli.explaining", "preview", "Say what a pool's policy would decide now."),
    "scale": ("springtide.cli.operate", "scale", "Pin a pool's number of workers, or give it back to the policy."),
    "pause": ("springtide.cli.operate", "pause", "Hold scaling of a pool for a while."),
    "resume": ("springtide.cli.operate", "resume", "End a pool's hold."),
    "drain": ("springtide.cli.operate", "drain", "Let a worker finish and stop it."),
    "undrain": ("springtide.cli.operate", "undrain", "Cancel a drain."),
    "activate": ("springtide.cli.operate", "activate", "Start an inactive worker."),
    "cancel": ("springtide.cli.operate", "cancel", "Cancel a start."),
    "sleep": ("springtide.cli.engines", "sleep", "Drain a worker and release its memory; the process stays."),
    "wake": ("springtide.cli.operate", "activate", "Wake a sleeping worker; the same as activate."),
    "lend": ("springtide.cli.engines", "lend", "Lend a sleeping worker's GPUs to a job outside."),
    "reclaim": ("springtide.cli.engines", "reclaim", "Claim lent GPUs back."),
    "engine": ("springtide.cli.engines", "engine", "One verb at a worker's engine: flush-cache, abort, pause, ..."),
    "worker-verb": ("springtide.cli.engines", "worker_verb", "The same with any verb and arguments, for scripts."),
    "weights": ("springtide.cli.engines", "weights", "Say which weights a pool serves."),
    "cordon": ("springtide.cli.operate", "cordon", "Place no new worker on a node."),
    "uncordon": ("springtide.cli.operate", "uncordon", "End a cordon."),
    "notice": ("springtide.cli.operate", "notice", "Say that a node is taken away soon: preemption, maintenance."),
    "token": ("springtide.cli.token", "token", "Make the secret that lets a provisioner in over a network."),
    "apply": ("springtide.cli.apply", "apply", "Create or change pools from a TOML or JSON file."),
    "delete": ("springtide.cli.apply", "delete", "Delete a pool."),
    "generate": ("springtide.cli.generate", "generate", "Stream one answer to the terminal."),
    "test": ("springtide.cli.trial", "test", "Send real generations and report latency and failures."),
    "controlplane": ("springtide.cli.processes", "controlplane", "Run a control plane (python -m controlplane)."),
    "nodeagent": ("springtide.cli.processes", "nodeagent", "Run a node agent (python -m nodeagent)."),
    "provisioner": ("springtide.cli.processes", "provisioner", "Run a provisioner (python -m provisioner)."),
    "router": ("springtide.cli.processes", "router", "Run a router (python -m router)."),
    "ray": ("springtide.cli.processes", "ray", "Run a Ray cluster of this host that grows GPU by GPU."),
    "simulate": ("springtide.cli.simulate", "simulate", "Simulate pools on a virtual clock (python -m simulator)."),
    "version": ("springtide.cli.inspect", "version", "Show the version."),
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs; the list of commands needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], list(_COMMANDS), n=1)
            hint = f"Did you mean {near[0]}?" if near else "`springtide --help` lists the commands."
            raise click.UsageError(f"There is no command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--address", metavar="HOST:PORT", help="Control plane [SPRINGTIDE_ADDRESS; default 127.0.0.1:7400].")
@click.option("--router", metavar="HOST:PORT", help="Router, gRPC [SPRINGTIDE_ROUTER; default 127.0.0.1:7500].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
@click.pass_context
def springtide(ctx: click.Context, /, **options: Any) -> None:
    """Keep the right number of LLM engines running and stream tokens from whichever are active.

    \b
    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 nobody answers, 4 not found,
    5 the state forbids it, 6 timed out waiting, 130 interrupted.
    """
    ctx.obj = options
