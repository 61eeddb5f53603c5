"""Real processes on this machine, by torch's elastic launcher; nothing leaves the loopback."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
Handler = Callable[[int, Any], None] | signal.Handlers
# Those that end a process.
SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
]


class ReplicaError(Exception):
    """A replica failed; the message says which one and why."""


class Interrupted(Exception):
    """A signal ended the replicas; `code` is the exit code by which a shell knows it."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by signal {number}")
        self.code = 128 + number


def launch(function: Callable[..., Any], replicas: int, *arguments: Any) -> list[Any]:
    """The results of `function(*arguments)` in so many new processes, in the order of ranks.

    The function is importable, and is called with the default process group (gloo, on the
    loopback) initialised and one thread. None of the processes outlives the call.

    Raises:
        ReplicaError: a process failed; the others were ended.
        Interrupted: by Ctrl-C, say.
    """
    before = multiprocessing.active_children()
    with (
        tempfile.TemporaryDirectory(prefix="meantime-") as name,
        _environment(),
        handling(),  # the launcher replaces them
        _silent(Path(name, "stderr")),
    ):
        folder = Path(name)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=replicas,
            run_id="meantime",
            # Processes meet in a file: a TCP store would listen on all interfaces.
            rdzv_backend="c10d",
            rdzv_endpoint=str(folder / "agent"),
            rdzv_configs={"store_type": "file", "timeout": 60},
            local_addr="127.0.0.1",
            max_restarts=0,
            # What a replica prints is kept aside: its error is reported below.
            logs_specs=DefaultLogsSpecs(log_dir=name, redirects=Std.ALL),
        )
        store = (folder / "replicas").as_uri()
        try:
            results = elastic_launch(config, _replica)(store, function, *arguments)
        except ChildFailedError as error:
            raise ReplicaError(_cause(error, folder)) from None
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        except KeyboardInterrupt:  # before the launcher took the signals over
            raise Interrupted(signal.SIGINT) from None
        finally:
            # The launcher ended them, unless another signal interrupted it there.
            for child in multiprocessing.active_children():
                if child not in before:
                    child.kill()
                    child.join()
    return [results[rank] for rank in range(replicas)]


def _replica(store: str, function: Callable[..., Any], *arguments: Any) -> Any:
    # Ctrl-C in a terminal reaches the replicas too: they end at once, whatever they wait for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _cause(error: ChildFailedError, folder: Path) -> str:
    """What the first replica that failed says.

    Those that lose it fail in turn, and the launcher may see one of them first. An error file is
    written as a replica fails, so the oldest one is the cause; a killed replica leaves none.
    """
    rank, failure = error.get_first_failure()
    files = list(folder.rglob("error.json")) if failure.exitcode >= 0 else []
    if files:
        first = min(files, key=lambda file: file.stat().st_mtime_ns)
        told = json.loads(first.read_text())["message"]
        trace = told["extraInfo"]["py_callstack"].rstrip()
        return f"replica {first.parent.name} failed: {told['message']}\n\n{trace}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"replica {rank} was ended by {name} (out of memory?)"
    printed = (folder / "stderr").read_text(errors="replace").rstrip()
    return f"replica {rank} failed with exit code {failure.exitcode}\n\n{printed}"


@contextmanager
def _environment() -> Iterator[None]:
    """What the processes inherit."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"  # they share this machine's cores
    if LOOPBACK is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def handling(handler: Handler | None = None) -> Iterator[None]:
    """Give the signals that end a process to a handler, if there is one; whatever handles them at
    the end, those who did before do so again."""
    before = {s: signal.getsignal(s) for s in SIGNALS}
    try:
        if handler is not None:
            for number in SIGNALS:
                signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def _silent(file: Path) -> Iterator[None]:
    """Write to a file what this process and the replicas print to stderr, and log nothing.

    The launcher logs pages about what is reported here in a sentence, and a replica that is
    interrupted while it imports torch prints a traceback.
    """
    level = logging.root.manager.disable
    sys.stderr.flush()
    terminal = os.dup(2)
    with file.open("wb") as aside:
        os.dup2(aside.fileno(), 2)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
