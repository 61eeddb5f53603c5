"""Real processes of a `torch.distributed` job (gloo, on loopback).

    run(function, 2, *arguments)            # processes of its own
    with Pool(4) as pool:                   # processes that are kept: starting them is slow
        pool.run(function, *arguments)

`function` is called as `function(*arguments)` in every process, with a default group of its own;
the list of its results comes back in the order of ranks. It must be importable: a function at
the top level of a module. The first rank that fails has its traceback re-raised
here. What fails or takes too long is killed, and the next `run` starts new processes.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

# How long the other ranks may still take once one has failed: they may wait for it for ever.
GRACE = 2.0


class ProcessError(AssertionError):
    """A rank failed; the message holds its traceback."""


class Pool:
    """`world` processes that wait for functions to run."""

    def __init__(self, world: int):
        self.world = world
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        if not self._workers:
            self._start()
        try:
            return self._run(function, arguments, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world):
            here, there = context.Pipe()
            worker = context.Process(target=_work, args=(rank, self.world, there), daemon=True)
            worker.start()
            there.close()
            self._workers.append(worker)
            self._pipes.append(here)

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        # Plain pickle, by value: multiprocessing's own would hand out shared memory.
        assert self._folder is not None
        store = Path(self._folder.name, f"rendezvous-{self._jobs}").as_uri()
        self._jobs += 1
        job = pickle.dumps((store, function, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it ended: seen below
                pipe.send_bytes(job)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.world:
            waiting = {
                pipe: rank
                for rank, pipe in enumerate(self._pipes)
                if rank not in results and rank not in failures
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    succeeded, value = False, "the process ended"
                (results if succeeded else failures)[rank] = value
                if not succeeded and len(failures) == 1:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = [rank for rank in range(self.world) if rank not in {*results, *failures}]
        if failures:
            rank, text = next(iter(failures.items()))
            also = f"; ranks {silent} did not answer" if silent else ""
            raise ProcessError(f"rank {rank} of {self.world} failed{also}:\n{text}")
        if silent:
            raise TimeoutError(f"ranks {silent} of {self.world} did not answer in {timeout} s")
        return [results[rank] for rank in range(self.world)]


def run(
    function: Callable[..., Any], world: int = 4, *arguments: Any, timeout: float = 60
) -> list[Any]:
    """The results of `function(*arguments)` in `world` new processes."""
    with Pool(world) as pool:
        return pool.run(function, *arguments, timeout=timeout)


def _work(rank: int, world: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:  # the parent is gone
            return
        try:
            store, function, arguments = pickle.loads(job)
            # Anew for every function, which may leave groups behind.
            dist.init_process_group(
                "gloo",
                init_method=store,
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=60),
            )
            answer = pickle.dumps((True, function(*arguments)))
            dist.destroy_process_group()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def worlds_of_2_3_4() -> Iterator[tuple[int, dist.ProcessGroup]]:
    """In a job of four: the first 2, 3 and 4 processes; this one's groups only."""
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            yield size, group
