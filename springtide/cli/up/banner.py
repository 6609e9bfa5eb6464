"""What is printed once the stack serves: addresses and three commands to try."""

import shutil
import sys
from pathlib import Path

import click

from springtide.cli.up.configs import Ports
from springtide.cli.up.options import UpPlan

QUESTION = "What is the capital of France?"


def lines(plan: UpPlan, ports: Ports, took_s: float) -> list[str]:
    pool = plan.options.pool
    http = f"http://{ports.http_address}/v1"
    body = f'{{"model":"{pool}","messages":[{{"role":"user","content":"{QUESTION}"}}]}}'
    to_router = "" if ports.router_address.endswith(":7500") else f" --router {ports.router_address}"
    to_controlplane = "" if ports.controlplane_address.endswith(":7400") else f" --address {ports.controlplane_address}"
    command = our_command()
    return [
        "",
        click.style(f"Springtide serves pool {pool} after {took_s:.1f} s.", bold=True),
        f"  control plane  {ports.controlplane_address}  gRPC, for operators",
        f"  router         {ports.router_address}  gRPC, for clients",
        f"  OpenAI         {http}",
        *(f"  metrics        http://{address}/metrics  {name}" for name, address in ports.metrics.items()),
        f"  logs           {plan.options.data_dir / 'logs'}",
        "",
        "Try in another terminal:",
        f"  {command}{to_router} generate --pool {pool} '{QUESTION}'",
        f"  curl {http}/chat/completions -H 'content-type: application/json' -d '{body}'",
        f"  {command}{to_controlplane} status --watch",
        "",
        "Ctrl-C stops everything.",
        "",
    ]


def our_command() -> str:
    """How to call this command line from here."""
    beside = Path(sys.executable).with_name("springtide")
    on_path = shutil.which("springtide")
    if on_path and (not beside.exists() or Path(on_path).resolve() == beside.resolve()):
        return "springtide"
    if not beside.exists():
        return f"{sys.executable} -m springtide.cli"
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
