"""`meantime demo`: options, launch, report."""

from __future__ import annotations

import multiprocessing
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meantime.cli import plot, report, tasks
from meantime.cli.launching import Interrupted, ReplicaError, launch
from meantime.cli.methods import METHODS, Settings
from meantime.cli.progress import heard, shown
from meantime.cli.training import Notify, Result, simulate, work


class TaskName(str, Enum):
    """The choices of `--task`."""

    text = "text"
    mnist = "mnist"


def demo(
    replicas: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that train together.")
    ] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Local steps of every method.")] = 1000,
    period: Annotated[
        int, typer.Option(min=1, help="Local steps from one synchronisation to the next.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the data order.")] = 0,
    task: Annotated[
        TaskName, typer.Option(help="A character language model, or handwritten digits.")
    ] = TaskName.text,
    methods: Annotated[str, typer.Option(help="Those to compare, separated by commas.")] = ",".join(
        METHODS
    ),
    out: Annotated[Path, typer.Option(help="Directory of the plot and of the results.")] = Path(
        "meantime-demo"
    ),
    simulated: Annotated[
        bool,
        typer.Option("--simulate", help="All replicas in one process, by torch.func.vmap."),
    ] = False,
) -> None:
    """Train one small model in several ways of averaging, and compare them."""
    console = Console()
    settings = Settings(task.value, _names(methods), replicas, steps, period, seed)
    try:
        problem = tasks.load(settings.task)
        problem.order(seed, 0, replicas, 0)
        folder = _folder(out)
        results = _run(console, settings, problem, simulated)
    except (tasks.DemoError, ReplicaError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except Interrupted as error:
        typer.echo("Interrupted: no process is left.", err=True)
        raise typer.Exit(error.code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    report.print_table(console, settings, results, real=not simulated)
    plot.draw(folder / "demo.png", settings, results, problem.title)
    report.write_json(folder / "demo.json", settings, results, real=not simulated)
    console.print(f"Plot: {folder / 'demo.png'}", soft_wrap=True, highlight=False)
    console.print(f"Results: {folder / 'demo.json'}", soft_wrap=True, highlight=False)


def _run(
    console: Console, settings: Settings, problem: tasks.Task, simulated: bool
) -> list[Result]:
    parameters = sum(leaf.numel() for leaf in problem.start(settings.seed).values())
    kind = "simulated replica" if simulated else "replica"
    console.print(
        f"Learning to {problem.title} with {report.count(settings.replicas, kind)}: "
        f"{parameters:,} parameters, {problem.batch} examples a step each.",
        highlight=False,
    )
    with shown(console, settings) as notify:
        return simulate(settings, notify) if simulated else _launched(settings, notify)


def _launched(settings: Settings, notify: Notify) -> list[Result]:
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with receiver, sender, heard(receiver, notify):
        results: list[Result] = launch(work, settings.replicas, settings, sender)[0]
    return results


def _names(methods: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise typer.BadParameter(
            f"{', '.join(unknown) or 'none given'}: choose from {', '.join(METHODS)}",
            param_hint="--methods",
        )
    return names


def _folder(out: Path) -> Path:
    """The directory, made now: not to be writable is known before the training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "demo.json").touch()
    except OSError as error:
        raise tasks.DemoError(f"cannot write to {out}: {error.strerror}") from None
    return out
