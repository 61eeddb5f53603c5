"""What the documentation shows is run: code blocks of Markdown files, examples of docstrings.

Every ```` ```python ```` block is executed, those of one file in order and in one namespace. A
block that is not meant to run has another language (`text`, `console`).
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import meantime

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if page.exists()]
# `__main__` modules are left out: to import one is to run the program.
MODULES = [
    "meantime",
    *(
        module.name
        for module in pkgutil.walk_packages(meantime.__path__, "meantime.")
        if not module.name.endswith(".__main__")
    ),
]
BLOCK = re.compile(r"^( *)```python\b[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[str]:
    """Each block, moved down to its own line so that tracebacks point into the page."""
    for match in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(2)) + textwrap.dedent(match[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A module, not a bare dict: dataclasses and pickle look their classes up by module.
    module = ModuleType(f"page_{page.stem}")
    module.__file__ = str(page)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for source in blocks(page.read_text(encoding="utf-8")):
        # dont_inherit: a reader's script has no `from __future__ import annotations`.
        exec(compile(source, str(page), "exec", dont_inherit=True), vars(module))


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(
        importlib.import_module(name),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed, see stdout"
