"""Time contenders side by side.

Machines are shared and noisy, so contenders take turns within each round of one run, and what
is quoted are medians and ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over all rounds, its ratio to the reference, and where it was
    measured the extra memory at its peak, in sizes of the tree."""

    median: float
    quartiles: tuple[float, float]
    minimum: float
    ratio: float  # of medians
    ratio_of_minima: float
    extra_memory: float | None = None


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    reference: str,
    rounds: int,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
    repeat: int = 1,
) -> dict[str, Timing]:
    """Run every contender so many times a round, after `before`; compare with the reference."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, run in contenders.items():
            before()
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            if number >= warmup:
                seconds[name].append((time.perf_counter() - start) / repeat)
    base = seconds[reference]
    return {
        name: Timing(
            median=statistics.median(taken),
            quartiles=(
                statistics.quantiles(taken, n=4)[0],
                statistics.quantiles(taken, n=4)[2],
            ),
            minimum=min(taken),
            ratio=statistics.median(taken) / statistics.median(base),
            ratio_of_minima=min(taken) / min(base),
        )
        for name, taken in seconds.items()
    }


def use_threads(count: int) -> None:
    """Confine this process and the libraries it loads later to so many CPUs."""
    import torch

    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:count])


def report(
    title: str,
    timings: Mapping[str, Timing],
    moved_bytes: int | None = None,
) -> None:
    """Print a table: medians, quartiles, ratios, the traffic of so many bytes, extra memory."""
    table = Table(title=title)
    table.add_column("", min_width=max(map(len, timings)))
    for column in ("median ms", "quartiles", "ratio", "of minima"):
        table.add_column(column, justify="right")
    if moved_bytes is not None:
        table.add_column("GB/s", justify="right")
    remembered = any(timing.extra_memory is not None for timing in timings.values())
    if remembered:
        table.add_column("extra memory", justify="right")
    for name, timing in timings.items():
        low, high = timing.quartiles
        cells = [
            f"{timing.median * 1e3:.3f}",
            f"{low * 1e3:.3f} - {high * 1e3:.3f}",
            f"{timing.ratio:.2f}",
            f"{timing.ratio_of_minima:.2f}",
        ]
        if moved_bytes is not None:
            cells.append(f"{moved_bytes / timing.median / 1e9:.1f}")
        if remembered:
            cells.append("" if timing.extra_memory is None else f"{timing.extra_memory:.2f}")
        table.add_row(name, *cells)
    console = Console()
    if not console.is_terminal:
        console.width = 110  # a file has no width
    console.print(table)


def write_json(path: Path, results: Mapping[str, Mapping[str, Timing]]) -> None:
    """Write all timings of a run."""
    plain = {
        title: {name: asdict(timing) for name, timing in timings.items()}
        for title, timings in results.items()
    }
    path.write_text(json.dumps(plain, indent=2) + "\n")
