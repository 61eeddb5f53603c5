"""Results of an experiment on disk, as tables and as a plot; and the command of each script."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from common import Experiment, Results, deviation, mean, run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
QUICK = Path(tempfile.gettempdir()) / "meantime-reproduce"
COLUMNS = {
    "synchronisations": ("synchronisations", 0),
    "megabytes": ("megabytes sent by each replica", 1),
    "peak": ("largest in a step (kB)", 0),
    "loss": ("validation loss", 3),
    "accuracy": ("test accuracy (%)", 2),
    "train": ("training loss", 4),
}
"""What is measured: its title and the decimals of a table."""


def read(experiment: Experiment, folder: Path) -> Results:
    """What was measured before, with what belongs to it."""
    results: Results = {}
    for name in (*experiment.also, experiment.name):
        path = folder / f"{name}.json"
        if not path.exists():
            raise SystemExit(f"{path} is missing: run {name}.py first, with the same options")
        results.update(json.loads(path.read_text()))
    return results


def write(results: Results, path: Path) -> None:
    """One line for each method."""
    lines = [f"{json.dumps(name)}: {json.dumps(runs)}" for name, runs in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def tables(experiment: Experiment, results: Results) -> str:
    """Two tables in Markdown: what was measured, and what became of the claims."""
    columns = {measure: COLUMNS[measure] for measure in experiment.measures}
    lines = ["| method | " + " | ".join(title for title, _ in columns.values()) + " |"]
    lines += ["|---|" + "---:|" * len(columns)]
    for method in results:
        cells = []
        for measure, (_, digits) in columns.items():
            value, spread = (f(results, method, measure) for f in (mean, deviation))
            cells.append(f"{value:,.{digits}f}" + (f" ± {spread:.{digits}f}" if spread else ""))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines += ["", "| the papers say | here | |", "|---|---|---|"]
    for claim in experiment.claims:
        _, digits = COLUMNS[claim.measure]
        pair = (mean(results, name, claim.measure) for name in (claim.first, claim.second))
        here = " and ".join(f"{value:.{digits}f}" for value in pair)
        lines.append(f"| {claim.said} | {here} | {'yes' if claim.holds(results) else '**no**'} |")
    return "\n".join(lines) + "\n"


def plot(experiment: Experiment, results: Results, path: Path) -> None:
    """A point for each method with its standard deviation; a line across where nothing is sent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    x, y = experiment.axes
    families: dict[str, list[str]] = {}
    for method in results:
        families.setdefault(method.split(", ")[0], []).append(method)
    points: list[tuple[float, float, str]] = []
    for number, (family, methods) in enumerate(families.items()):
        style = {"color": f"C{number % 10}", "label": family}
        if not mean(results, methods[0], x):
            axes.axhline(mean(results, methods[0], y), linestyle="--", **style)
            continue
        across, up = ([mean(results, name, measure) for name in methods] for measure in (x, y))
        spread = [deviation(results, name, y) for name in methods]
        axes.errorbar(across, up, spread, fmt="os^D"[number // 10], capsize=3, **style)
        points += zip(across, up, (name.partition(", ")[2] for name in methods), strict=True)
    axes.set(xscale="log", xlabel=COLUMNS[x][0], ylabel=COLUMNS[y][0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_title(experiment.title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.draw_without_rendering()
    label(axes, points)
    figure.savefig(path, dpi=80)


def label(axes: Axes, points: list[tuple[float, float, str]]) -> None:
    """Names to the right of points, from the lowest up, each above those it would be written on."""
    placed: list[tuple[float, float]] = []
    for across, up, name in sorted(points, key=lambda point: point[1]):
        left, bottom = axes.transData.transform((across, up))
        start = bottom
        for other, height in sorted(placed, key=lambda place: place[1]):
            if abs(other - left) < 60 and abs(height - bottom) < 12:
                bottom = height + 12
        placed += [(left, bottom)] if name else []
        offset = 6, -3 + 72 * (bottom - start) / axes.figure.dpi
        axes.annotate(name, (across, up), offset, textcoords="offset points", fontsize=8)


def main(experiment: Experiment) -> None:
    """Run all methods; write results, tables and plot."""
    parser = argparse.ArgumentParser(description=f"{experiment.title}.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, a tenth of the steps; into a temporary folder",
    )
    parser.add_argument("--again", action="store_true", help="tables and plot, from old results")
    parser.add_argument("--out", type=Path, help="folder of what is written; default: results")
    options = parser.parse_args()
    folder = options.out or (QUICK if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{experiment.name}.json"
    if not options.again:
        torch.set_num_threads(1)  # more do not help so small a model
        steps, seeds = experiment.steps, options.seeds
        write(run(experiment, *((steps // 10, 1) if options.quick else (steps, seeds))), path)
    results = read(experiment, folder)
    report = tables(experiment, results)
    path.with_suffix(".md").write_text(report, encoding="utf-8")
    plot(experiment, results, path.with_suffix(".png"))
    print(f"{report}\nin {folder}")
