"""Training to a validation loss against the clock, on one of the hosts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import meantime as mt
from meantime.cli import tasks
from meantime.cli.bench.network.hosts import INTERFACE
from meantime.cli.bench.network.methods import METHODS, Settings
from meantime.cli.bench.network.processes import Send
from meantime.cli.bench.network.trainers import DDPTrainer, FunctionalTrainer, Trainer
from meantime.cli.tasks import Params, Task
from meantime.cli.training import ring_bytes

LEARNING_RATE = 1e-3
EMBEDDING = 96


@dataclass
class Run:
    """What one method did, as host 0 saw it.

    Attributes:
        method: a name of `METHODS`.
        seed: of the weights and of the order of the data.
        steps, seconds, losses: when the validation loss was measured, and what it was. Seconds
            do not include the measuring.
        sent: the bytes that left the host through its interface.
        counted: the bytes that its messages amount to, if every mean is a ring all-reduce.
        reached: whether it got to the target.
        finished: whether it is over.
    """

    method: str
    seed: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: int = 0
    counted: float = 0.0
    reached: bool = False
    finished: bool = False


def text_model(hidden: int, batch: int) -> Task:
    """The demo's character language model with wide layers: many parameters, little to compute."""
    task = tasks.load("text")
    small = task.start(seed=0)
    alphabet, width = small["embedding"].shape
    context = len(small["weight0"]) // width

    def init(generator: torch.Generator) -> Params:
        embedding = torch.randn(alphabet, EMBEDDING, generator=generator)
        params = tasks.layers(generator, context * EMBEDDING, hidden, hidden, alphabet)
        # The last layer starts small: the first predictions are near to uniform.
        return {"embedding": embedding, **params, "weight2": 0.1 * params["weight2"]}

    return replace(task, init=init, batch=batch)


class Meter:
    """Seconds, and bytes sent by this host, from `start` to `stop`; of all hosts at once."""

    def __init__(self) -> None:
        self.seconds, self.sent = 0.0, 0

    def start(self) -> None:
        dist.barrier()
        self._since = time.perf_counter(), _sent()

    def stop(self) -> None:
        dist.barrier()
        seconds, sent = self._since
        self.seconds += time.perf_counter() - seconds
        self.sent += _sent() - sent


def _sent() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def work(send: Send, settings: Settings) -> None:
    """Train with every method; host 0 sends each `Run` after every measuring."""
    task = text_model(settings.hidden, settings.batch)
    # What is slow the first time is not part of any method's time.
    start = task.start(seed=0)
    mt.value_and_grad(task.loss)(start, task.order(0, 0, settings.hosts, 1)[0])
    for seed, name in product(range(settings.repeats), settings.methods):
        start = task.start(seed)
        order = task.order(seed, dist.get_rank(), settings.hosts, settings.steps)
        trainer = _trainer(name, task, start, settings)
        train(trainer, order, Run(name, seed), task, settings, send)


def _trainer(method: str, task: Task, start: Params, settings: Settings) -> Trainer:
    transform = METHODS[method].transform
    if transform is None:
        return DDPTrainer(task.loss, start, LEARNING_RATE)
    return FunctionalTrainer(task.loss, start, transform(mt.adamw(LEARNING_RATE), settings.period))


def train(
    trainer: Trainer, order: Tensor, run: Run, task: Task, settings: Settings, send: Send
) -> None:
    """Train until the loss is reached, or time or steps are used up.

    The loss is measured after synchronisations, outside of the clock.
    """
    meter = Meter()
    synchronised, measured = 0, 0
    meter.start()
    for step, rows in enumerate(order, 1):
        trainer.step(rows)
        due = trainer.synchronisations > synchronised and step - measured >= settings.stride
        if not due and step < len(order):
            continue
        synchronised, measured = trainer.synchronisations, step
        meter.stop()
        if dist.get_rank() == 0:
            with torch.no_grad():
                loss = task.evaluate(trainer.params)["loss"].item()
            run.steps.append(step)
            run.seconds.append(meter.seconds)
            run.losses.append(loss)
            run.sent = meter.sent
            run.counted = ring_bytes(trainer.message_bytes, settings.hosts)
            run.reached = loss <= settings.target
            run.finished = run.reached or meter.seconds > settings.seconds or step == len(order)
            send(run)
        if _told(run.finished):
            break
        meter.start()


def _told(finished: bool) -> bool:
    """What host 0 says, on all hosts."""
    word = torch.tensor(finished)
    dist.broadcast(word, src=0)
    return bool(word)
