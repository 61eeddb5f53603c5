"""What is shown while the demo runs: bars in a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meantime.cli.methods import METHODS, Settings
from meantime.cli.training import Notify


@contextmanager
def shown(console: Console, settings: Settings) -> Iterator[Notify]:
    """Show progress; yields what is to be told of it."""
    if console.is_terminal:
        yield from _bars(console, settings)
    else:
        yield from _lines(console, settings)


def _bars(console: Console, settings: Settings) -> Iterator[Notify]:
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        bars = {
            method: progress.add_task(
                METHODS[method].title, total=settings.steps, start=False, loss=" " * 10
            )
            for method in settings.methods
        }

        def notify(method: str, step: int, loss: float | None) -> None:
            if step == 0:
                progress.start_task(bars[method])
            text = f"loss {loss:.3f}" if loss is not None else " " * 10
            progress.update(bars[method], completed=step, loss=text)

        yield notify


def _lines(console: Console, settings: Settings) -> Iterator[Notify]:
    def notify(method: str, step: int, loss: float | None) -> None:
        title = METHODS[method].title
        if step == 0:
            console.print(f"{title}: training")
        elif step == settings.steps:
            known = f", validation loss {loss:.3f}" if loss is not None else ""
            console.print(f"{title}: {step} steps{known}")

    yield notify


@contextmanager
def heard(receiver: Connection, notify: Notify) -> Iterator[None]:
    """Pass on what comes through a pipe, until all that was sent has come."""
    done = threading.Event()

    def listen() -> None:
        while not done.is_set() or receiver.poll():
            if receiver.poll(0.1):
                try:
                    notify(*receiver.recv())
                except EOFError:
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        done.set()
        listener.join(timeout=2)
