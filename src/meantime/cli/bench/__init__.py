"""`meantime bench`: how fast the library is, against its peers and the physical limit."""

import typer

from meantime.cli.bench.average import average
from meantime.cli.bench.loop import loop
from meantime.cli.bench.network import network
from meantime.cli.bench.simulate import simulate
from meantime.cli.bench.step import step

app = typer.Typer(no_args_is_help=True, help="Measure the library on this machine.")
app.command()(step)
app.command()(average)
app.command()(loop)
app.command()(simulate)
app.command()(network)
