"""The picture of the demo: loss against steps, and against bytes sent."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

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
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    replicas = "1 replica" if settings.replicas == 1 else f"{settings.replicas} replicas"
    figure.suptitle(
        f"Learning to {title}: {replicas}, period {settings.period}",
        color=INK,
        x=0.008,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    for result in results:
        colour, losses = COLOURS[result.method], result.measures["loss"]
        left.plot(result.steps, losses, color=colour, linewidth=2)
        pairs = [(s / 1e6, y) for s, y in zip(result.sent, losses, strict=True) if s > 0]
        if pairs:
            right.plot(*zip(*pairs, strict=True), color=colour, linewidth=2)
            right.plot(*pairs[-1], "o", color=colour, markersize=7, clip_on=False)
    _limit(left, results)
    left.set(xlim=(0, settings.steps), xlabel="local steps", ylabel="validation loss")
    left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    left.set_title("against steps", loc="left", color=INK, fontsize=11)
    right.set(xlabel="megabytes sent by each replica (ring all-reduce, log scale)")
    _label_ends(left, results)
    _traffic_axis(right, results)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, which="both")
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    figure.savefig(path, dpi=150)


def _traffic_axis(axes: Axes, results: list[Result]) -> None:
    sent = [count for result in results for count in result.sent if count > 0]
    silent = [METHODS[result.method].title for result in results if result.sent[-1] == 0]
    missing = f"  ({', '.join(silent)}: nothing to send)" if silent else ""
    if not sent:
        missing = "  (nothing was sent)"
    axes.set_title(f"against traffic{missing}", loc="left", color=INK, fontsize=11)
    if not sent:
        axes.set(xticks=[])
        return
    axes.set_xscale("log")
    narrow = max(sent) / min(sent) < 30
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _limit(axes: Axes, results: list[Result]) -> None:
    """Leave out the steep beginning, which is the same for all."""
    lowest = min(min(result.measures["loss"]) for result in results)
    ends = [result.measures["loss"][-1] for result in results]
    first = max(result.measures["loss"][min(2, len(result.steps) // 5)] for result in results)
    top = max(first, *ends)
    margin = 0.06 * (top - lowest) or 0.1
    axes.set_ylim(lowest - margin, top + margin)


def _label_ends(axes: Axes, results: list[Result]) -> None:
    """The name and the last loss of each line at its end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.06 * (high - low)
    ordered = sorted(results, key=lambda result: result.measures["loss"][-1])
    places = _apart([result.measures["loss"][-1] for result in ordered], gap)
    places = [max(place, low + (i + 0.4) * gap) for i, place in enumerate(places)]
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


def _apart(places: list[float], gap: float) -> list[float]:
    """Sorted places, moved as little as it takes to be a gap apart."""
    # Take one gap a place out: what must be apart must now be sorted. Groups that are not
    # become their mean.
    groups: list[list[float]] = []
    for i, place in enumerate(places):
        groups.append([place - i * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [_mean(group) for group in groups for _ in group]
    return [value + i * gap for i, value in enumerate(level)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
