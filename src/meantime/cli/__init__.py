"""The command line: `meantime demo`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the entry point `meantime`, also `python -m meantime.cli`."""
    try:
        import matplotlib as matplotlib
        import rich as rich
        import typer as typer
    except ImportError as missing:
        package = (missing.name or "a package").partition(".")[0]
        sys.exit(f"The command line needs {package}: pip install 'meantime[cli]'")
    except KeyboardInterrupt:  # importing takes seconds: someone may change their mind
        sys.exit(130)
    try:
        from meantime.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    app()
