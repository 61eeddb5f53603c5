"""What the demo says in the end: a table, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from meantime.cli.methods import METHODS, Settings
from meantime.cli.training import Result


def print_table(console: Console, settings: Settings, results: list[Result], real: bool) -> None:
    """The last measures, the traffic and the time of every method."""
    accurate = all("accuracy" in result.measures for result in results)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    headers = ["held-out\nloss", *(["test\naccuracy"] if accurate else []), "synchro-\nnisations"]
    headers += ["MB sent by\na replica", "seconds", "in commu-\nnication"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        cells = [METHODS[result.method].title, f"{result.measures['loss'][-1]:.3f}"]
        if accurate:
            cells.append(f"{result.measures['accuracy'][-1]:.3f}")
        cells += [f"{result.synchronisations:,}", megabytes(result.sent[-1])]
        waited = result.communicating
        cells += [f"{result.seconds:.1f}", "-" if waited is None else f"{waited:.1f}"]
        table.add_row(*cells)
    console.print(table)
    for note in notes(settings, real):
        console.print(note, style="dim", highlight=False)


def notes(settings: Settings, real: bool) -> list[str]:
    """What one has to know to read the table."""
    text = f"Every replica makes {count(settings.steps, 'step')} on its own data"
    text += f"; the period is {count(settings.period, 'step')}."
    if "post-local-sgd" in settings.methods:
        text += f" Post-local SGD averages gradients for {count(settings.warmup, 'step')} first."
    lines = [text]
    lines.append(
        "Bytes: a ring all-reduce sends 2 (K-1)/K times its message from each replica of K."
    )
    if real:
        where = f"{count(settings.replicas, 'replica')} on {count(os.cpu_count() or 1, 'core')}"
        lines.append(
            f"Seconds: of replica 0, without measuring the loss; {where}, with no network to slow "
            "them down. One replica alone has a core for itself."
        )
    else:
        lines.append("Seconds: of the simulation, in which nothing is sent.")
    if "diloco" in settings.methods and settings.outer_momentum != 0.9:
        lines.append(
            f"DiLoCo: outer momentum {settings.outer_momentum} here; the paper's 0.9 overshoots on "
            "this small problem and ends at a lower accuracy."
        )
    lines.append("One seed: small differences between methods are noise; try other seeds.")
    return lines


def write_json(path: Path, settings: Settings, results: list[Result], real: bool) -> None:
    """Settings, versions and all that was measured."""
    document: dict[str, Any] = {
        "settings": {
            **asdict(settings),
            "warmup": settings.warmup,
            "outer_momentum": settings.outer_momentum,
            "simulated": not real,
        },
        "bytes": "sent by each replica in ring all-reduces: 2 (K-1)/K of each message",
        "machine": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cores": os.cpu_count(),
        },
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def megabytes(count: float) -> str:
    """Bytes in MB with three digits or all before the point."""
    return f"{count / 1e6:.3g}" if 0 < count < 1e8 else f"{count / 1e6:,.0f}"


def count(number: int, thing: str) -> str:
    """`1 step`, `1,000 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
