"""The commands of `meantime`."""

from __future__ import annotations

import typer

from meantime.cli import bench
from meantime.cli.demo import demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def meantime() -> None:
    """Training with periodic parameter averaging."""


app.command()(demo)
app.add_typer(bench.app, name="bench")
