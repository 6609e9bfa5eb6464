"""`springtide simulate`: run a load, compare policies, or let random worlds fail."""

import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from controlplane.plugins import load_policies
from simulator import load as loads
from simulator.load import Arrival
from simulator.page import summary_rows, write_page
from simulator.performance import Constants, Performance, Table
from simulator.picture import draw, to_svg, write_png
from simulator.replay import Fleet, Scenario, one_pool, replay, split_pools
from simulator.results import Slo, scaling_rows, summarize, write_looks, write_requests, write_scaling
from simulator.world import Route, World
from springtide.errors import FailedPrecondition, InvalidArgument, SpringtideError
from springtide.model.pool import PolicySpec, RoutingSpec, Setting


class ErrorsShown(click.Group):
    """An error of ours is one line with its remedy, and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpringtideError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


@click.group(cls=ErrorsShown, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def simulate() -> None:
    """Run the real control plane and routing against modelled engines, on a virtual clock."""
    load_policies()


@simulate.command()
@click.option("--trace", type=click.Path(path_type=Path), help="A trace: Azure 2023 or splitwise CSV.")
@click.option("--poisson", type=float, metavar="RATE", help="Requests per second, Poisson.")
@click.option("--bursty", type=float, metavar="RATE", help="The same mean, with bursts of six times the rate.")
@click.option("--config", type=click.Path(path_type=Path), help="A YAML file in the fourth seed's form.")
@click.option("--length", "length_s", type=float, help="Seconds of the load [traces: all; generators: 3600].")
@click.option("--begin", "begin_s", type=float, default=0.0, help="Seconds of a trace to leave out first.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Times the load.")
@click.option("--burst-factor", type=float, default=1.0, show_default=True, help="Times the load, in bursts only.")
@click.option("--prompt-tokens", type=float, default=1024.0, show_default=True, help="Mean, for generators.")
@click.option("--output-tokens", type=float, default=128.0, show_default=True, help="Mean, for generators.")
@click.option("--policy", default="load_ratio", show_default=True, help="Scaling policy.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the policy; repeatable.")
@click.option("--routing", default="least_in_flight", show_default=True, help="Routing policy, by name.")
@click.option("--min-workers", type=int, default=1, show_default=True)
@click.option("--max-workers", type=int, default=16, show_default=True)
@click.option("--initial-workers", type=int, default=None, help="ACTIVE at the begin [min-workers].")
@click.option("--split", metavar="PREFILL,DECODE", help="Two pools with KV transfer, with so many initial workers.")
@click.option("--nodes", type=int, default=4, show_default=True)
@click.option("--gpus", type=int, default=8, show_default=True, help="Per node.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, help="GPUs per worker.")
@click.option("--start-up", "start_up_s", type=float, default=20.0, show_default=True, help="Seconds to ACTIVE.")
@click.option("--performance", type=click.Path(path_type=Path), help="Splitwise's perf_model.csv.")
@click.option("--model", default="llama2-70b", show_default=True, help="Of the performance table.")
@click.option("--hardware", default="h100-80gb", show_default=True, help="Of the performance table.")
@click.option("--ttft", "ttft_s", type=float, default=1.0, show_default=True, help="Target, seconds.")
@click.option("--tbt", "tbt_s", type=float, default=0.05, show_default=True, help="Target, seconds.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for CSV files, picture and page.")
@click.option("--picture/--no-picture", default=True, help="Draw it (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def run(**options: Any) -> None:
    """Replay a trace or a generated load and say what came of it."""
    slo = Slo(options["ttft_s"], options["tbt_s"])
    load = _load(options)
    began_s = time.process_time()
    world = replay(_scenario(options), load)
    click.echo(_price(world, time.process_time() - began_s), err=True)
    summary = summarize(world, slo)
    if options["out"] is not None:
        _write(world, slo, options)
    if options["as_json"]:
        click.echo(json.dumps(asdict(summary), indent=2))
        return
    for name, value in summary_rows(summary):
        click.echo(f"{name:<32} {value}")


def _price(world: World, cpu_s: float) -> str:
    """What the run cost: CPU time, since other work on the machine does not count in it."""
    count, virtual_s = len(world.requests), world.now - world.load_began_at
    rate = count / max(cpu_s, 1e-9)
    return (
        f"{count} requests, {virtual_s:.0f} virtual seconds in {cpu_s:.2f} s of CPU time: {rate:,.0f} requests a second"
    )


def _load(options: dict[str, Any]) -> list[Arrival]:
    given = [name for name in ("trace", "poisson", "bursty") if options[name] is not None]
    if len(given) != 1:
        raise InvalidArgument(
            field="trace",
            value=", ".join(given) or None,
            problem="exactly one load is simulated",
            remedy="Give one of --trace, --poisson and --bursty.",
        )
    length_s, sizes = options["length_s"], (options["prompt_tokens"], options["output_tokens"])
    if given == ["trace"]:
        load = loads.cut(loads.read_trace(options["trace"]), options["begin_s"], length_s)
    else:
        rate = options[given[0]]
        if not 0 < rate < math.inf or min(sizes) < 1:
            raise InvalidArgument(field=given[0], value=rate, problem="is no rate > 0", remedy="Give e.g. 5.")
        make = loads.poisson if given == ["poisson"] else loads.bursty
        load = make(rate, length_s or 3600.0, *sizes, options["seed"])
    load = loads.scaled(load, options["scale"]) if options["scale"] != 1 else load
    return loads.burst_times(load, options["burst_factor"]) if options["burst_factor"] != 1 else load


def _scenario(options: dict[str, Any]) -> Scenario:
    if options["config"] is not None:
        from simulator.seed_config import read_config, scenario_of

        return replace(scenario_of(read_config(options["config"])), seed=options["seed"])
    performance: Performance = Constants()
    if options["performance"] is not None:
        performance = Table.read(
            options["performance"],
            model=options["model"],
            hardware=options["hardware"],
            tensor_parallel=options["tensor_parallel"],
        )
    policy = PolicySpec(options["policy"], dict(_setting(text) for text in options["settings"]))
    pool = one_pool(
        policy,
        min_workers=options["min_workers"],
        max_workers=options["max_workers"],
        initial_workers=options["initial_workers"],
        tensor_parallel_size=options["tensor_parallel"],
        routing=RoutingSpec(options["routing"]),
    )
    pools, route = (pool,), Route(pool.name)
    if options["split"]:
        try:
            prefill, decode = map(int, options["split"].split(","))
        except ValueError:
            problem, remedy = "is not two numbers", "Give e.g. --split 2,2."
            raise InvalidArgument(field="split", value=options["split"], problem=problem, remedy=remedy) from None
        pools, route = split_pools(pool, prefill, decode), Route("prompt", "token")  # type: ignore[assignment]
    return Scenario(
        pools=pools,
        routes={loads.DEFAULT_KIND: route},
        fleet=Fleet(options["nodes"], options["gpus"], options["start_up_s"]),
        performance=performance,
        seed=options["seed"],
    )


def _setting(text: str) -> tuple[str, Setting]:
    key, found, value = text.partition("=")
    if not found:
        raise InvalidArgument(field="set", value=text, problem="has no =", remedy="Give --set key=value.")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return key, read if isinstance(read, str | int | float | bool) or read is None else value


def _write(world: World, slo: Slo, options: dict[str, Any]) -> None:
    out: Path = options["out"]
    out.mkdir(parents=True, exist_ok=True)
    summary = summarize(world, slo)
    scaling = scaling_rows(world.store.events, world.load_began_at)
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    write_requests(out / "requests.csv", world.requests, world.load_began_at)
    write_scaling(out / "scaling.csv", scaling)
    write_looks(out / "looks.csv", world.looks)
    title = f"{options['trace'].name if options['trace'] else 'generated load'}, policy {options['policy']}"
    svg = ""
    if options["picture"]:
        try:
            figure = draw(world.looks, world.requests, world.load_began_at, slo, title)
            write_png(out / "picture.png", figure)
            svg = to_svg(figure)
        except FailedPrecondition as error:
            click.echo(f"no picture: {error}", err=True)
    command = "springtide simulate " + " ".join(sys.argv[1:])
    write_page(out / "page.html", title, summary, scaling, svg, command)
    click.echo(f"written to {out}/", err=True)


@simulate.command()
@click.option("--seed", type=int, default=None, help="Replay this one and print what happened.")
@click.option("--seeds", type=int, default=300, show_default=True, help="How many to run, from --first on.")
@click.option("--first", type=int, default=0, show_default=True)
@click.option("--minutes", type=float, default=None, help="Run seeds for so long instead.")
def swarm(seed: int | None, seeds: int, first: int, minutes: float | None) -> None:
    """Random worlds with random faults: what must hold is checked all the time. Exit code 1 when something failed."""
    from simulator.swarm import run_seed

    if seed is not None:
        outcome = run_seed(seed)
        for line in outcome.transcript:
            click.echo(line)
        click.echo(f"seed {seed}: {outcome.violation or 'all held'} (digest {outcome.digest})")
        sys.exit(1 if outcome.violation else 0)
    end = None if minutes is None else time.monotonic() + minutes * 60
    failed, done, virtual_s = [], 0, 0.0
    while done < seeds if end is None else time.monotonic() < end:
        outcome = run_seed(first + done)
        done += 1
        virtual_s += outcome.virtual_s
        if outcome.violation:
            failed.append(outcome.seed)
            click.echo(f"seed {outcome.seed}: {outcome.violation}\n  springtide simulate swarm --seed {outcome.seed}")
    click.echo(f"{done} seeds, {virtual_s / 3600:.1f} virtual hours, {len(failed)} failed")
    sys.exit(1 if failed else 0)


@simulate.command()
@click.option("--traces", type=click.Path(path_type=Path), default=Path("tests/data/traces"), show_default=True)
@click.option("--policy", default=None, help="Ours [the one that we recommend: slo].")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of ours; repeatable.")
@click.option("--loads", "names", default="code,conv,code-burst", show_default=True)
@click.option("--start-ups", default="20,120", show_default=True, help="Seconds.")
@click.option("--length", "length_s", type=float, default=None, help="Only the first seconds of each trace.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Processes.")
@click.option("--write", type=click.Path(path_type=Path), default=None, help="A page with marks for the tables.")
def compare(**options: Any) -> None:
    """Our default policy and other projects' algorithms on the same traces. Exit code 1 when ours is beaten."""
    from simulator import compare as comparison

    ours = comparison.default_policy()
    if options["policy"] is not None:
        ours = PolicySpec(options["policy"], dict(_setting(text) for text in options["settings"]))
    chosen = comparison.cases(options["names"].split(","), [float(text) for text in options["start_ups"].split(",")])
    found = comparison.compare(
        options["traces"],
        ours,
        jobs=options["jobs"],
        length_s=options["length_s"],
        chosen=chosen,
        tell=lambda text: click.echo(text, err=True),
    )
    tables = comparison.to_markdown(found)
    if options["write"] is not None:
        comparison.write_tables(options["write"], tables)
    click.echo(tables)
    sys.exit(1 if any(comparison.beaten_by(rows) for rows in found.values()) else 0)
