"""`meantime bench network`: training on hosts with slow links, against DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import meantime as mt
from meantime.cli.bench.network.hosts import NetworkError, bits, connected
from meantime.cli.bench.network.methods import METHODS, Settings
from meantime.cli.bench.network.processes import launch
from meantime.cli.bench.network.report import draw, print_table, write_json
from meantime.cli.bench.network.training import Run, text_model, work
from meantime.cli.launching import Interrupted, ReplicaError
from meantime.cli.tasks import DemoError

# Ours is as slow as DDP, and computes the same.
USUAL = [name for name in METHODS if name != "data-parallel"]


def network(
    rate: Annotated[str, typer.Option(help="Of every link in each direction.")] = "100mbit",
    hosts: Annotated[int, typer.Option(min=2, max=16, help="Hosts that train together.")] = 2,
    methods: Annotated[str, typer.Option(help="Those to compare, separated by commas.")] = ",".join(
        USUAL
    ),
    target: Annotated[float, typer.Option(help="The validation loss to reach.")] = 2.5,
    period: Annotated[
        int, typer.Option(min=2, help="Local steps from one synchronisation to the next.")
    ] = 20,
    seconds: Annotated[float, typer.Option(min=0, help="When a method is given up.")] = 600,
    steps: Annotated[int, typer.Option(min=1, help="Or after so many local steps.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every method.")] = 1,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 2176,
    batch: Annotated[int, typer.Option(min=1, help="Examples a step on every host.")] = 64,
    out: Annotated[Path, typer.Option(help="Directory of the plot.")] = Path("meantime-bench"),
    results: Annotated[Path | None, typer.Option("--json", help="Write all runs here.")] = None,
) -> None:
    """Train a language model on hosts with slow links, to a validation loss.

    The hosts are network namespaces of this machine (Linux, as root).
    """
    settings = Settings(
        methods=_names(methods, period),
        hosts=hosts,
        rate=_rate(rate),
        period=period,
        target=target,
        seconds=seconds,
        steps=steps,
        hidden=hidden,
        batch=batch,
        repeats=repeats,
    )
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    try:
        runs = _run(console, settings)
    except (DemoError, NetworkError, ReplicaError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except Interrupted as error:
        typer.echo("Interrupted: no host and no process is left.", err=True)
        raise typer.Exit(error.code) from None
    print_table(console, settings, runs)
    draw(out / "network.png", settings, runs)
    console.print(f"Plot: {out / 'network.png'}", soft_wrap=True, highlight=False)
    if results is not None:
        write_json(results, settings, runs)


def _run(console: Console, settings: Settings) -> list[Run]:
    start = text_model(settings.hidden, settings.batch).start(seed=0)
    parameters = sum(leaf.numel() for leaf in start.values())
    runs: dict[tuple[str, int], Run] = {}
    with connected(settings.hosts, settings.rate) as hosts:
        console.print(f"Training {parameters:,} parameters on {settings.hosts} hosts.")
        with console.status("Starting") as status:

            def receive(run: Run) -> None:
                runs[run.method, run.seed] = run
                said = (
                    f"{METHODS[run.method].title}: {run.steps[-1]:,} steps, "
                    f"{run.seconds[-1]:.1f} s, validation loss {run.losses[-1]:.3f}"
                )
                status.update(said)
                if run.finished:
                    console.print(said, highlight=False)

            launch(hosts, receive, work, settings)
    return list(runs.values())


def _rate(text: str) -> int:
    try:
        return bits(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None


def _names(methods: str, period: int) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in methods.split(",")))
    for name in names:
        if name not in METHODS:
            raise typer.BadParameter(
                f"{name!r}: choose from {', '.join(METHODS)}", param_hint="--methods"
            )
        transform = METHODS[name].transform
        try:
            if transform is not None:
                transform(mt.identity(), period)
        except ValueError as error:
            raise typer.BadParameter(f"{name}: {error}", param_hint="--period") from None
    return names
