"""What is compared on a slow network, and with which settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import meantime as mt


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Attributes:
        methods: names of `METHODS`.
        hosts: how many train together.
        rate: of every host's link, in bits a second.
        period: local steps from one synchronisation to the next; also the warm-up of
            post-local SGD.
        target: the validation loss at which a method is done.
        seconds, steps: when it is given up.
        hidden: the width of the model's two hidden layers.
        batch: examples in a batch of one host.
        repeats: how often everything is done, with other weights and data.
    """

    methods: tuple[str, ...]
    hosts: int
    rate: int
    period: int
    target: float
    seconds: float
    steps: int
    hidden: int
    batch: int
    repeats: int

    @property
    def stride(self) -> int:
        """The fewest steps from one measuring of the loss to the next."""
        return max(1, self.period // 10)


@dataclass(frozen=True)
class Method:
    """A row of the table and a line of the plot; without a transform it is torch's DDP."""

    title: str
    colour: str
    transform: Callable[[mt.Transform, int], mt.Transform] | None = None


def _compressed_diloco(inner: mt.Transform, every: int, codec: mt.Codec) -> mt.Transform:
    optimizer = mt.sgd(0.7, momentum=0.9, nesterov=True)
    mean = mt.chain(mt.error_feedback(codec), mt.mean(codec=codec))
    return mt.chain(inner, mt.periodic(mt.outer(mt.chain(mean, optimizer)), every))


REFERENCE = "ddp"
# Okabe & Ito's colours, told apart by all eyes.
METHODS = {
    REFERENCE: Method("DDP (torch)", "#333333"),
    "data-parallel": Method(
        "data parallel", "#0072b2", lambda inner, every: mt.chain(mt.mean(), inner)
    ),
    "post-local-sgd": Method(
        "post-local SGD",
        "#cc79a7",
        lambda inner, every: mt.post_local_sgd(inner, every, warmup=every),
    ),
    "diloco": Method("DiLoCo", "#009e73", lambda inner, every: mt.diloco(inner, every)),
    "streaming-diloco": Method(
        "streaming DiLoCo",
        "#56b4e9",
        lambda inner, every: mt.streaming_diloco(inner, every, fragments=2),
    ),
    "diloco-int8": Method(
        "DiLoCo, int8",
        "#e69f00",
        lambda inner, every: _compressed_diloco(inner, every, mt.codecs.int8()),
    ),
    "diloco-int4": Method(
        "DiLoCo, int4",
        "#d55e00",
        lambda inner, every: _compressed_diloco(inner, every, mt.codecs.int4()),
    ),
}
