"""What the experiments share: replicas under `vmap`, and what is measured of them.

The whole loop of a run is inside `torch.func.vmap`: counters are then the same for all replicas,
so that a mean that is not due is not computed, and what `Recorded` notes is what real replicas
would send. (A compiled step is no faster here: it counts on every replica for itself, and so
computes every mean.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

import meantime as mt
from meantime.cli import tasks
from meantime.cli.tasks import Task

REPLICAS = 8
Results = dict[str, list[dict[str, float]]]
"""For each method the measures of each seed."""


class Method(NamedTuple):
    """How replicas train: the transform; their number; whether each draws from all of the data or
    from a part of its own; how many are a `"node"` of the `"world"`, if there are levels."""

    transform: mt.Transform
    replicas: int = REPLICAS
    shared: bool = True
    node: int | None = None


class Traffic(mt.Recorded):
    """A record in which the mean of sparse messages is what it is for processes: all go to all."""

    def mean(self, tree: Any, *, codec: mt.Codec | None = None, **options: Any) -> Any:
        result = super().mean(tree, codec=codec, **options)
        if codec is not None and codec.sparse:
            self.calls[-1] = "gather", self.calls[-1][1]
        return result


class Claim(NamedTuple):
    """What a paper says of a measure of two methods: that of the first is lower, if the second's is
    multiplied by a factor; or it is `as_good`, worse by the larger standard deviation at most."""

    said: str
    first: str
    second: str
    measure: str = "loss"
    factor: float = 1.0
    as_good: bool = False

    def holds(self, results: Results) -> bool:
        pair = self.first, self.second
        first, second = (mean(results, name, self.measure) for name in pair)
        if not self.as_good:
            return first < self.factor * second
        worse = second - first if self.measure == "accuracy" else first - second
        return worse <= max(deviation(results, name, self.measure) for name in pair)


@dataclass(frozen=True)
class Experiment:
    """Methods that are compared on one task.

    Attributes:
        name: of the files of its results.
        title: of the plot.
        task: what is learned.
        steps: local steps of every run.
        methods: for so many steps, by name: "family, variant".
        measures: the columns of the table.
        axes: the two measures of the plot.
        claims: what the papers say.
        also: other experiments on the same task, whose results belong to these.
    """

    name: str
    title: str
    task: Callable[[], Task]
    steps: int
    methods: Callable[[int], dict[str, Method]]
    measures: tuple[str, ...]
    axes: tuple[str, str]
    claims: tuple[Claim, ...]
    also: tuple[str, ...] = ()


def text(hidden: int = 480) -> Task:
    """The demo's text and network, with so many hidden units, its first matrix in three leaves: of
    four fragments of the parameters each is then about a quarter."""
    task = tasks.load("text")

    def init(generator: torch.Generator) -> tasks.Params:
        params = task.init(generator)
        inputs, characters = len(params["weight0"]), len(params["embedding"])
        layers = tasks.layers(generator, inputs, hidden, characters)
        parts = {f"first{i}": part for i, part in enumerate(layers.pop("weight0").chunk(3))}
        last = 0.1 * layers.pop("weight1")
        return {"embedding": params["embedding"], **parts, **layers, "weight1": last}

    def whole(params: tasks.Params) -> tasks.Params:
        return {**params, "weight0": torch.cat([params[f"first{i}"] for i in range(3)])}

    return replace(
        task,
        init=init,
        loss=lambda params, rows: task.loss(whole(params), rows),
        evaluate=lambda params: task.evaluate(whole(params)),
    )


def train(task: Task, method: Method, steps: int, seed: int) -> dict[str, float]:
    """One run: what the mean of the replicas is worth at the end, and what each of them sent."""
    world = Traffic(mt.Vmapped(method.replicas))
    levels = {"world": world, "node": world.groups(method.node)} if method.node else world
    records = [world] if levels is world else list(levels.values())
    start = task.start(seed)
    gradient = torch.func.grad(task.loss)
    traffic: list[float] = []

    def replica(order: torch.Tensor) -> tasks.Params:
        params, state = start, method.transform.init(start)
        for rows in order:
            grads = gradient(params, rows)
            params, state = mt.step(method.transform, grads, params, state, replicas=levels)
            traffic.append(sum(map(sent, records)))
        return params

    final = torch.func.vmap(replica)(batches(task, method, steps, seed))
    final = {name: p.mean(0) for name, p in final.items()}
    seen = torch.arange(0, task.rows, max(1, task.rows // 4096))
    measures = {"train": task.loss(final, seen), **task.evaluate(final)}
    if "accuracy" in measures:
        measures["accuracy"] = 100 * measures["accuracy"]
    return {
        "synchronisations": sum(size > 0 for size in traffic),
        "megabytes": round(sum(traffic) / 1e6, 3),
        "peak": round(max(traffic) / 1e3, 1),
        **{name: round(value.item(), 5) for name, value in measures.items()},
    }


def batches(task: Task, method: Method, steps: int, seed: int) -> torch.Tensor:
    """The examples of every step of each replica; (replicas, steps, batch)."""
    share = task.rows if method.shared else task.rows // method.replicas
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(share, (method.replicas, steps, task.batch), generator=generator)
    return rows if method.shared else rows + share * torch.arange(method.replicas)[:, None, None]


def sent(world: mt.Recorded) -> float:
    """Bytes each replica has sent since the last call, where a mean is a ring all-reduce."""
    factors = {"mean": 2 * (world.size - 1) / world.size, "gather": world.size - 1}
    total = sum(factors.get(name, 1) * size for name, size in world.calls)
    world.calls.clear()
    return total


def run(experiment: Experiment, steps: int, seeds: int, *only: str) -> Results:
    """The runs of the methods with these names, or of all; prints the time they took."""
    task, methods = experiment.task(), experiment.methods(steps)
    results = {}
    for name in only or methods:
        begun = time.perf_counter()
        results[name] = [train(task, methods[name], steps, seed) for seed in range(seeds)]
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return results


def mean(results: Results, method: str, measure: str) -> float:
    """Over the seeds."""
    return fmean(run[measure] for run in results[method])


def deviation(results: Results, method: str, measure: str) -> float:
    """The standard deviation over the seeds."""
    values = [run[measure] for run in results[method]]
    return stdev(values) if len(values) > 1 else 0.0
