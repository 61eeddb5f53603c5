"""The training loop, the same for one method as for another and for real as for simulated
replicas: only `world` differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

import meantime as mt
from meantime.cli import tasks
from meantime.cli.methods import METHODS, Settings
from meantime.cli.tasks import Params, Task

Notify = Callable[[str, int, float | None], None]
"""Told of progress: the method, the steps made and, where it is known, the validation loss."""


@dataclass
class Result:
    """What one method did, as replica 0 saw it.

    Attributes:
        method: a name of `METHODS`.
        steps: the steps after which it was measured.
        sent: the bytes each replica had sent by then, if every mean is a ring all-reduce.
        measures: `"loss"` and perhaps `"accuracy"` at those steps, on held-out data.
        synchronisations: how many means the replicas took.
        seconds: the duration without the measuring.
        communicating: seconds of it spent in means, waiting for other replicas included; None
            in a simulation.
    """

    method: str
    steps: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    measures: dict[str, list[float]] = field(default_factory=dict)
    synchronisations: int = 0
    seconds: float = 0.0
    communicating: float | None = None


def ring_bytes(message: int, replicas: int) -> float:
    """What each replica sends in a ring all-reduce of a message."""
    return 2 * (replicas - 1) / replicas * message


@dataclass(frozen=True)
class Run:
    """One method for one replica.

    Attributes:
        task, settings: what is trained, and how.
        start: the initial weights.
        world: the replicas, with a record of their means.
        result: where counts and times are noted.
        watch: called with the steps made and the loss after each measuring; None measures
            nothing.
    """

    task: Task
    settings: Settings
    start: Params
    world: mt.Recorded
    result: Result
    watch: Callable[[int, Tensor], None] | None = None

    def train(self, order: Tensor) -> dict[str, Tensor]:
        """Train on the examples of every step; the measures at the steps of `evaluated()`.

        The measures are returned, not noted in the result: inside `vmap` they have no values.
        Counts do, because a mean is due on all replicas or on none.
        """
        task, settings, world = self.task, self.settings, self.world
        tx = METHODS[self.result.method].transform(task.inner(settings.steps), settings)
        gradient = torch.func.grad(task.loss)
        params = self.start
        state = tx.init(params)
        points = set(settings.evaluated()) if self.watch else set()
        measured: list[dict[str, Tensor]] = []

        start = time.perf_counter()
        if 0 in points:
            measured.append(self._measure(0, params))
        for step in range(1, settings.steps + 1):
            grads = gradient(params, order[step - 1])
            updates, state = tx.update(grads, state, params, replicas=world)
            params = mt.apply_updates(params, updates)
            params, state = tx.average(params, state, replicas=world)
            if step in points:
                measured.append(self._measure(step, params))
        self.result.seconds += time.perf_counter() - start
        self.result.synchronisations = len(world.calls)
        names = measured[0] if measured else ()
        return {name: torch.stack([measures[name] for measures in measured]) for name in names}

    def _measure(self, step: int, params: Params) -> dict[str, Tensor]:
        start = time.perf_counter()
        measures = self.task.evaluate(params)
        self.result.steps.append(step)
        self.result.sent.append(ring_bytes(self.world.bytes, self.world.size))
        if self.watch is not None:
            self.watch(step, measures["loss"])
        self.result.seconds -= time.perf_counter() - start
        return measures


def simulate(settings: Settings, notify: Notify) -> list[Result]:
    """Every method with all replicas in this process, by `torch.func.vmap`."""
    task = tasks.load(settings.task)
    start = task.start(settings.seed)
    results = []
    for method in settings.methods:
        size = 1 if METHODS[method].alone else settings.replicas
        orders = [_order(task, settings, rank) for rank in range(size)]
        result = Result(method)

        def watch(step: int, loss: Tensor, method: str = method) -> None:
            notify(method, step, None)

        run = Run(task, settings, start, mt.Recorded(mt.Vmapped(size)), result, watch)
        # The whole loop is inside `vmap`: counters are the same for all replicas, so that a mean
        # that is not due is not computed, and what is recorded is what real replicas would do.
        with _one_thread():
            measures = torch.func.vmap(run.train)(torch.stack(orders))
        result.measures = {name: values[0].tolist() for name, values in measures.items()}
        results.append(result)
    return results


def work(settings: Settings, progress: Connection) -> list[Result]:
    """Every method as one of the processes of a `torch.distributed` job.

    Replica 0 measures and reports to `progress`; the results of the others are incomplete.
    """
    task = tasks.load(settings.task)
    start = task.start(settings.seed)
    rank = dist.get_rank()
    order = _order(task, settings, rank)
    # What is slow the first time is not part of any method's time.
    short = replace(settings, steps=1, period=1)
    Run(task, short, start, mt.Recorded(mt.Distributed()), Result("data-parallel")).train(order)
    results = []
    for method in settings.methods:
        alone = METHODS[method].alone
        world = mt.Recorded(mt.Solo() if alone else mt.Distributed())
        result = Result(method)

        def watch(step: int, loss: Tensor, method: str = method) -> None:
            progress.send((method, step, loss.item()))

        dist.barrier()
        if rank == 0 or not alone:
            run = Run(task, settings, start, world, result, watch if rank == 0 else None)
            measures = run.train(order)
            result.measures = {name: values.tolist() for name, values in measures.items()}
            result.communicating = world.seconds
        results.append(result)
    return results


def _order(task: Task, settings: Settings, rank: int) -> Tensor:
    return task.order(settings.seed, rank, settings.replicas, settings.steps)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As each replica has: more do not help so small a model, and spin where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
