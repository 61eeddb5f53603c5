"""What `meantime bench network` says in the end: a table, a picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from meantime.cli.bench.network.methods import METHODS, REFERENCE, Settings
from meantime.cli.bench.network.training import Run
from meantime.cli.plot import INK
from meantime.cli.report import count, megabytes


def typical(runs: Iterable[Run]) -> dict[str, Run]:
    """Of every method the run that takes the median of the time; those that fail take longest."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: (not run.reached, run.seconds[-1]))
    return {method: group[(len(group) - 1) // 2] for method, group in groups.items()}


def speed_up(run: Run, chosen: dict[str, Run]) -> float | None:
    """How many times sooner than DDP it reaches the target, if both do."""
    reference = chosen.get(REFERENCE)
    if reference is None or not (reference.reached and run.reached):
        return None
    return reference.seconds[-1] / run.seconds[-1]


def print_table(console: Console, settings: Settings, runs: list[Run]) -> None:
    """The typical run of every method."""
    chosen = typical(runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    headers = [f"seconds\nto {settings.target:g}", "times\nas fast", "steps", "steps\na s"]
    headers += ["MB on\nthe wire", "MB of\nmessages", "limit of\nthe link"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for method, run in chosen.items():
        seconds, faster = run.seconds[-1], speed_up(run, chosen)
        table.add_row(
            METHODS[method].title,
            f"{seconds:.1f}" if run.reached else f"> {seconds:.0f}",
            "-" if faster is None else f"{faster:.1f}",
            f"{run.steps[-1]:,}",
            f"{run.steps[-1] / seconds:.2f}",
            megabytes(run.sent),
            megabytes(run.counted),
            f"{full_rate(run, settings):.1f}",
        )
    console.print(table)
    for note in notes(settings):
        console.print(note, style="dim", highlight=False)


def full_rate(run: Run, settings: Settings) -> float:
    """The seconds in which a link that never rests carries what was sent."""
    return run.sent * 8 / settings.rate


def notes(settings: Settings) -> list[str]:
    """What one has to know to read the table."""
    lines = [
        f"{count(settings.hosts, 'host')} with links of {settings.rate / 1e6:g} Mbit/s in each "
        f"direction; the period is {count(settings.period, 'step')}, as is the warm-up of "
        "post-local SGD.",
        "Seconds: without measuring the loss, which is done after synchronisations.",
        "Bytes: of host 0; messages as of ring all-reduces, on the wire with headers. "
        "Limit: the seconds in which the link carries them at its full rate.",
    ]
    if settings.repeats > 1:
        lines.append(f"Of {settings.repeats} runs of each method, the one with the median time.")
    return lines


def write_json(path: Path, settings: Settings, runs: list[Run]) -> None:
    """Settings and all that was measured."""
    document = {"settings": asdict(settings), "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def draw(path: Path, settings: Settings, runs: list[Run]) -> None:
    """Write the picture as PNG: validation loss against time."""
    chosen = typical(runs)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(
        f"{count(settings.hosts, 'host')} on links of {settings.rate / 1e6:g} Mbit/s: time to a "
        f"validation loss of {settings.target:g}",
        color=INK,
        x=0.008,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    for run in runs:
        faint = run is not chosen[run.method]
        axes.plot(
            run.seconds,
            run.losses,
            color=METHODS[run.method].colour,
            alpha=0.3 if faint else 1,
            linewidth=1 if faint else 2,
            marker="" if faint else "o",
            markevery=[-1],
        )
    axes.axhline(settings.target, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    _label_ends(axes, chosen)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds of training (log scale)", color=INK)
    axes.set_ylabel("validation loss", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.tick_params(colors=INK, which="both")
    figure.savefig(path, dpi=150)


def _label_ends(axes: Axes, chosen: dict[str, Run]) -> None:
    """Name the ends of the lines below all of them, the later the higher.

    So no name stands in the way of the line that leads to another one.
    """
    low = min(min(run.losses) for run in chosen.values())
    high = max(max(run.losses) for run in chosen.values())
    gap = 0.06 * (high - low) or 0.1
    ordered = sorted(chosen.values(), key=lambda run: -run.seconds[-1])
    for place, run in enumerate(ordered, 1):
        method, (x, y) = METHODS[run.method], (run.seconds[-1], run.losses[-1])
        faster = speed_up(run, chosen)
        ratio = "" if faster is None or run.method == REFERENCE else f", {faster:.1f} times as fast"
        axes.plot([x, x], [y, low - place * gap], color=method.colour, linewidth=0.8)
        axes.annotate(
            f"{method.title}: {x:.0f} s{ratio}" if run.reached else f"{method.title}: not reached",
            (x, low - place * gap),
            xytext=(4, 0),
            textcoords="offset points",
            va="bottom",
            color=method.colour,
            fontweight="bold",
            fontsize=9.5,
        )
    axes.set_ylim(low - (len(ordered) + 0.5) * gap, high + gap)
    first = min(min(run.seconds) for run in chosen.values())
    axes.set_xlim(0.8 * first, 4 * ordered[0].seconds[-1])  # there is room for the last name
