"""The picture of the demo: loss against steps, and against bytes sent."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from meantime.cli.methods import METHODS, Settings
from meantime.cli.training import Result

# Okabe & Ito's colours, told apart by all eyes.
COLOURS = {
    "single": "#7f7f7f",
    "data-parallel": "#0072b2",
    "local-sgd": "#e69f00",
    "post-local-sgd": "#cc79a7",
    "diloco": "#009e73",
}
INK = "#333333"


def draw(path: Path, settings: Settings, results: list[Result], title: str) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    steps, sent = figure.subplots(1, 2, sharey=True)
    replicas = f"{settings.replicas} replica{'s' if settings.replicas > 1 else ''}"
    figure.suptitle(f"{title}, {replicas}", color=INK, x=0.01, ha="left", fontsize=13)
    for result in results:
        colour, losses = COLOURS[result.method], result.measures["loss"]
        steps.plot(result.steps, losses, color=colour, linewidth=2)
        pairs = [(s / 1e6, y) for s, y in zip(result.sent, losses, strict=True) if s > 0]
        if pairs:
            sent.plot(*zip(*pairs, strict=True), color=colour, linewidth=2)
            sent.plot(*pairs[-1], "o", color=colour, markersize=7, clip_on=False)
    _limit(steps, results)
    steps.set(xlim=(0, settings.steps), xlabel="local steps", ylabel="validation loss")
    _label_ends(steps, results)
    sent.set(xlabel="megabytes sent by each replica")
    if sent.lines:
        sent.set_xscale("log")
    else:
        sent.set(xticks=[])
        sent.text(0.5, 0.5, "nothing was sent", transform=sent.transAxes, ha="center", color=INK)
    for axes in (steps, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=3)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    figure.savefig(path, dpi=150)


def _limit(axes: Axes, results: list[Result]) -> None:
    """Leave out the steep beginning, which is the same for all."""
    lowest = min(min(result.measures["loss"]) for result in results)
    ends = [result.measures["loss"][-1] for result in results]
    first = max(result.measures["loss"][min(2, len(result.steps) - 1)] for result in results)
    top = max(first, *ends)
    margin = 0.06 * (top - lowest) or 0.1
    axes.set_ylim(lowest - margin, top + margin)


def _label_ends(axes: Axes, results: list[Result]) -> None:
    """The name and the last loss of each line at its end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.062 * (high - low)
    ordered = sorted(results, key=lambda result: result.measures["loss"][-1])
    places: list[float] = []
    for result in ordered:
        wanted = result.measures["loss"][-1]
        places.append(max(wanted, places[-1] + gap) if places else max(wanted, low + gap / 2))
    for result, place in zip(ordered, places, strict=True):
        axes.annotate(
            f"{METHODS[result.method].title}  {result.measures['loss'][-1]:.3f}",
            (1.0, place),
            xytext=(8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=COLOURS[result.method],
            fontweight="bold",
            fontsize=9.5,
            annotation_clip=False,
        )
