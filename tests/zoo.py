"""Every transform of the library with a few hyperparameters: what the batteries run over.

`ZOO` maps a name to a function without arguments that makes the transform. Periods are short,
so that six steps see every kind of step. The sets below say what holds for which of them.
"""

from __future__ import annotations

from collections.abc import Callable

import meantime as mt
from meantime import tree

linear = mt.schedules.linear
ZOO: dict[str, Callable[[], mt.Transform]] = {
    # gradient transforms
    "identity": mt.identity,
    "scale": lambda: mt.scale(-0.5),
    "scale_by_schedule": lambda: mt.scale_by_schedule(linear(1.0, 0.1, steps=5)),
    "scale_by_sign": mt.scale_by_sign,
    "scale_by_learning_rate": lambda: mt.scale_by_learning_rate(mt.schedules.cosine(0.1, 8)),
    "scale_by_adam": mt.scale_by_adam,
    "trace": lambda: mt.trace(0.9),
    "trace_dampened": lambda: mt.trace(linear(0.5, 0.9, steps=4), dampening=0.3),
    "trace_nesterov": lambda: mt.trace(0.9, nesterov=True),
    "clip": lambda: mt.clip(0.5),
    "clip_by_global_norm": lambda: mt.clip_by_global_norm(1.0),
    "add_decayed_weights": lambda: mt.add_decayed_weights(0.1),
    "add_decayed_weights_masked": lambda: mt.add_decayed_weights(
        linear(0.1, 0.0, steps=4), mask=lambda params: tree.map(lambda p: p.ndim > 0, params)
    ),
    "sgd": lambda: mt.sgd(0.1),
    "sgd_momentum": lambda: mt.sgd(0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": lambda: mt.sgd(
        mt.schedules.warmup_cosine(0.1, warmup=2, steps=8), momentum=0.9, nesterov=True
    ),
    "adam": lambda: mt.adam(1e-2),
    "adam_scheduled": lambda: mt.adam(
        mt.schedules.exponential(1e-2, 0.5, 4), b1=linear(0.5, 0.9, steps=4), eps=1e-3
    ),
    "adamw": lambda: mt.adamw(1e-2, weight_decay=0.1),
    "adamw_masked": lambda: mt.adamw(
        1e-2, weight_decay=0.1, mask=lambda params: tree.map(lambda p: p.ndim > 0, params)
    ),
    "lion": lambda: mt.lion(1e-2, weight_decay=0.1),
    "lion_scheduled": lambda: mt.lion(1e-2, b1=linear(0.5, 0.9, steps=4)),
    "chain": lambda: mt.chain(mt.clip_by_global_norm(1.0), mt.trace(0.9), mt.scale(-0.1)),
    "named_chain": lambda: mt.named_chain(clip=mt.clip(1.0), inner=mt.sgd(0.1, momentum=0.9)),
    # what communicates in `update`
    "data_parallel": lambda: mt.chain(mt.mean(), mt.sgd(0.1, momentum=0.9)),
    "warmup_mean": lambda: mt.chain(mt.warmup_mean(2), mt.sgd(0.1)),
    "warmup_mean_then": lambda: mt.chain(mt.warmup_mean(2, over="world", then="node"), mt.sgd(0.1)),
    # averagers
    "average_params": mt.average_params,
    "periodic": lambda: mt.periodic(mt.average_params(), every=2),
    "periodic_first_last": lambda: mt.periodic(
        mt.average_params(), every=3, after=1, first=2, last=6
    ),
    "periodic_scheduled": lambda: mt.periodic(
        mt.average_params(), every=mt.schedules.piecewise(1, {2: 2.0})
    ),
    "alternate": lambda: mt.alternate(
        mt.average_params("node"), mt.average_params("world"), every=2
    ),
    "outer_sgd": lambda: mt.outer(mt.chain(mt.mean(), mt.sgd(1.0))),
    "outer_adam": lambda: mt.outer(mt.chain(mt.clip(1.0), mt.mean(), mt.adam(0.1))),
    "partition": lambda: mt.partition(
        {0: mt.sgd(0.1), 1: mt.periodic(mt.average_params(), every=2), 2: mt.adam(1e-2)},
        lambda params: tree.map(lambda p: min(p.ndim, 2), params),
    ),
    # overlapped communication
    "delayed": lambda: mt.delayed(
        mt.periodic(mt.outer(mt.chain(mt.mean(), mt.sgd(0.7))), every=2), steps=1, merge=0.5
    ),
    "delayed_delta": lambda: mt.delayed(
        mt.periodic(mt.average_params(), every=2), steps=1, merge="delta"
    ),
    "eager_mean": lambda: mt.outer(mt.chain(mt.eager_mean(), mt.sgd(1.0))),
    "overlapped": lambda: mt.periodic(mt.overlapped(), every=2),
    "delayed_nesterov": lambda: mt.outer(
        mt.chain(mt.mean(), mt.delayed_nesterov(linear(0.7, 0.3, steps=4), every=2, c=0.2))
    ),
    # gossip and relatives
    "gossip": mt.gossip,
    "gossip_exponential": lambda: mt.periodic(mt.gossip("exponential"), every=2),
    "gossip_levels": lambda: mt.alternate(
        mt.gossip(over="node"), mt.gossip("exponential", over="world"), every=2
    ),
    "push_sum": mt.push_sum,
    "elastic": lambda: mt.periodic(mt.elastic(), every=2),
    "noloco": lambda: mt.periodic(mt.noloco(), every=2),
    # federated learning
    "scaffold": lambda: mt.chain(
        mt.periodic(mt.scaffold(linear(0.1, 0.05, steps=4), 0.5), every=2),
        mt.sgd(linear(0.1, 0.05, steps=4)),
    ),
    "fednova": lambda: mt.chain(mt.periodic(mt.fednova(), every=2), mt.adam(1e-2)),
    # averagers of the trajectory
    "ema": lambda: mt.ema(linear(0.5, 0.9, steps=4)),
    "ema_warmup": lambda: mt.chain(
        mt.sgd(0.1), mt.periodic(mt.average_params(), every=2), mt.ema(0.9, warmup=True)
    ),
    "swa": lambda: mt.outer(mt.chain(mt.mean(), mt.sgd(0.7, momentum=0.9), mt.swa())),
    "lawa": lambda: mt.periodic(mt.chain(mt.average_params(), mt.lawa(2)), every=2),
    # recipes
    "local_sgd": lambda: mt.local_sgd(mt.sgd(0.1), every=2),
    "local_sgd_scheduled": lambda: mt.local_sgd(
        mt.adamw(1e-2), every=mt.schedules.piecewise(2, {2: 0.5}), last=6
    ),
    "post_local_sgd": lambda: mt.post_local_sgd(mt.sgd(0.1, momentum=0.9), every=2, warmup=2),
    "hierarchical_sgd": lambda: mt.hierarchical_sgd(
        mt.sgd(0.1, momentum=0.9), every={"node": 1, "world": 3}
    ),
    "slowmo": lambda: mt.slowmo(mt.sgd(0.1), learning_rate=0.1, every=2),
    "slowmo_scheduled": lambda: mt.slowmo(
        mt.sgd(linear(0.1, 0.05, steps=6)), learning_rate=linear(0.1, 0.05, steps=6), every=3
    ),
    "diloco": lambda: mt.diloco(mt.adamw(1e-2), every=2),
    "diloco_scheduled": lambda: mt.diloco(
        mt.sgd(0.1), every=3, learning_rate=linear(0.7, 0.3, steps=2), momentum=0.0
    ),
    "diloco_compressed": lambda: mt.diloco(mt.sgd(0.1), every=2, codec=mt.codecs.bf16()),
    "streaming_diloco": lambda: mt.streaming_diloco(mt.sgd(0.1), every=2, fragments=1),
    "streaming_diloco_delayed": lambda: mt.streaming_diloco(
        mt.sgd(0.1), every=2, fragments=1, pattern="strided", delay=1
    ),
    "desloc": lambda: mt.desloc(mt.adam(1e-2), every=1, periods={"mu": 2, "nu": 3}),
    "bmuf": lambda: mt.bmuf(mt.sgd(0.1), every=2),
    "lookahead": lambda: mt.lookahead(mt.adam(0.1), every=2),
    "snoo": lambda: mt.snoo(mt.sgd(0.1), every=2),
    "fedavg": lambda: mt.fedavg(mt.sgd(0.1, momentum=0.9), every=2),
    "fedavgm": lambda: mt.fedavgm(mt.sgd(0.1), every=3),
    "fedadam": lambda: mt.fedadam(mt.sgd(0.1), every=2, learning_rate=0.1),
    "fedyogi": lambda: mt.fedyogi(mt.sgd(0.1), every=2, learning_rate=0.1),
    "fedadagrad": lambda: mt.fedadagrad(mt.adam(0.1), every=2, learning_rate=0.1),
    "fedprox": lambda: mt.fedprox(mt.sgd(0.1), every=2, strength=0.1),
    "demo": lambda: mt.demo(0.1, 0.9),
    # every=3: messages are float32, too coarse for finite differences of the first two steps
    "sparse_loco": lambda: mt.sparse_loco(mt.sgd(0.1), every=3, fraction=0.3),
}

LEVELLED = {"warmup_mean_then", "alternate", "gossip_levels", "hierarchical_sgd"}
"""Those that want `replicas={"node": ..., "world": ...}`."""

PLAIN = {
    "average_params",
    "periodic",
    "periodic_first_last",
    "periodic_scheduled",
    "alternate",
    "gossip",
    "gossip_exponential",
    "gossip_levels",
    "push_sum",
    "outer_sgd",
    "ema_warmup",
    "lawa",
    "desloc",
    "fedavg",
    "fedprox",
    "delayed_delta",
    "local_sgd",
    "local_sgd_scheduled",
    "post_local_sgd",
    "hierarchical_sgd",
}
"""Those that put the plain mean of all replicas in their place at `average(..., now=True)`."""

AVERAGERS = PLAIN | {
    "elastic",
    "noloco",
    "outer_adam",
    "swa",
    "slowmo",
    "slowmo_scheduled",
    "diloco",
    "diloco_scheduled",
    "diloco_compressed",
    "streaming_diloco",
    "scaffold",
    "fednova",
    "bmuf",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "delayed_nesterov",
    "sparse_loco",
}
"""Those that leave all replicas equal after `average(..., now=True)`."""
