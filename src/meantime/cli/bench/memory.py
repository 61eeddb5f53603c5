"""How much more memory a contender takes while it runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def extra_memory(run: Callable[[], object], repeat: int = 3) -> float:
    """Bytes that this process occupied at most while it ran, less those before; NaN where the
    system does not tell (it is asked in the way of Linux)."""
    if not _STATUS.exists() or not _CLEAR.exists():
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what others freed is not there for this one
    before = _occupied("VmRSS")
    _CLEAR.write_text("5")  # the peak begins again
    for _ in range(repeat):
        run()
    return max(0.0, _occupied("VmHWM") - before)


def _occupied(field: str) -> float:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    return float("nan")
