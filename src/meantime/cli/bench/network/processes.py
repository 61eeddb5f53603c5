"""One process of a `torch.distributed` job on every host of a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meantime.cli.bench.network.hosts import INTERFACE, Network
from meantime.cli.launching import ReplicaError

Send = Callable[[Any], None]
"""Sends a message to the process that launched this one."""


def launch(
    network: Network, receive: Callable[[Any], None], function: Callable[..., None], *arguments: Any
) -> None:
    """Call `function(send, *arguments)` on every host, and `receive` with what is sent.

    The function is importable, and is called with the default process group (gloo, over the
    network) initialised and one thread. None of the processes outlives the call.

    Raises:
        ReplicaError: a process failed; the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="meantime-") as folder, ExitStack() as stack:
        running = {}
        for rank in range(network.hosts):
            here, there = Pipe()
            stack.enter_context(here)
            said = Path(folder, str(rank))
            with there, said.open("wb") as file:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", network.host(rank), sys.executable, "-c", _code(there)],
                    env=_environment(network, rank),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[there.fileno()],
                    # Ctrl-C in a terminal does not reach it: it is ended below.
                    start_new_session=True,
                )
                stack.callback(_end, process)
            running[here] = rank, process, said
            with suppress(OSError):  # it ended: seen below
                here.send((function, arguments))
        while running:
            ready = wait(list(running))
            for pipe in [pipe for pipe in running if pipe in ready]:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    _check(*running.pop(pipe))
                else:
                    receive(message)


def _check(rank: int, process: subprocess.Popen[bytes], said: Path) -> None:
    """Raise if it failed. The first that fails is the cause: the others fail as they lose it."""
    if process.wait():
        told = said.read_text(errors="replace").rstrip()
        code = process.returncode
        raise ReplicaError(f"the process on host {rank} failed with exit code {code}\n\n{told}")


def work(descriptor: int) -> None:
    """What one of the processes does; the descriptor is that of its end of a pipe."""
    torch.set_num_threads(1)
    pipe: Connection = Connection(descriptor)
    function, arguments = pipe.recv()
    dist.init_process_group("gloo")
    function(pipe.send, *arguments)
    dist.barrier()
    # Not by way of the destructors: those of DDP and gloo together sometimes abort the process.
    os._exit(0)


def _code(pipe: Connection) -> str:
    return f"from {__name__} import work; work({pipe.fileno()})"


def _environment(network: Network, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(network.hosts),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
