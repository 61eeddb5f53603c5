"""Local SGD and what is made of it: plain means of parameters and of gradients."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import (
    STEPS,
    NumpyAdamW,
    NumpySGD,
    Recipe,
    data,
    everyone,
    falling,
    in_nodes,
)


class NumpyClippedNesterov:
    """By value, by norm, with decayed weights."""

    def __init__(self):
        self.buffer, self.steps = 0.0, 0

    def __call__(self, theta, g):
        g = np.clip(g, -0.8, 0.8)
        norm = np.linalg.norm(g, axis=1, keepdims=True)
        g = g * np.minimum(1, 1.0 / norm) + 0.1 * theta
        self.buffer = g if self.steps == 0 else 0.6 * self.buffer + g
        rate, self.steps = falling(self.steps), self.steps + 1
        return theta - rate * (g + 0.6 * self.buffer)


class NumpyLion:
    def __init__(self, rate, decay, b1=0.9, b2=0.99):
        self.rate, self.decay, self.b1, self.b2 = rate, decay, b1, b2
        self.m = 0.0

    def __call__(self, theta, g):
        direction = np.sign(self.b1 * self.m + (1 - self.b1) * g)
        self.m = self.b2 * self.m + (1 - self.b2) * g
        return theta - self.rate * (direction + self.decay * theta)


def ref_local(theta, grad, inner, every, warmup=0, last=None):
    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, everyone(g) if t <= warmup else g)
        due = t > warmup and (t - warmup) % every == 0
        if last is not None:
            due = (due and t <= last) or t == last
        if due:
            theta = everyone(theta)
        yield theta


def ref_skipping(theta, grad, rules, every):
    """Each replica has a rule of its own, and no update where its second target is negative."""
    for t in range(1, STEPS + 1):
        busy = data().y[:, t - 1, 1] > 0
        rows = zip(rules, theta, grad(theta, t), busy, strict=True)
        theta = np.stack([rule(x, g) if works else x for rule, x, g, works in rows])
        theta = everyone(theta) if t % every == 0 else theta
        yield theta


def ref_weighted(theta, grad, inner, warmup, due):
    """Means by the weights of the recipe; of gradients first, of parameters after these steps."""

    def mean(rows, t):
        weight = np.abs(data().y[:, t - 1, :1])
        return np.broadcast_to((weight * rows).sum(0) / weight.sum(), rows.shape)

    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, mean(g, t) if t <= warmup else g)
        theta = mean(theta, t) if t in due else theta
        yield theta


def ref_levels_of_gradients(theta, grad, inner, warmup, every):
    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, everyone(g) if t <= warmup else in_nodes(g))
        theta = everyone(theta) if t % every == 0 else theta
        yield theta


def ref_hierarchical(theta, grad, inner, node, world):
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % world == 0:
            theta = everyone(theta)
        elif t % node == 0:
            theta = in_nodes(theta)
        yield theta


_falling = mt.schedules.cosine(0.2, steps=10, end=0.1)

RECIPES = {
    "local_sgd": Recipe(
        lambda: mt.local_sgd(mt.sgd(0.1), every=3),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.1), every=3),
    ),
    "local_sgd, last": Recipe(
        lambda: mt.local_sgd(mt.compile(mt.sgd(0.1)), every=4, last=10),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.1), every=4, last=10),
    ),
    "post_local_sgd, momentum": Recipe(
        lambda: mt.post_local_sgd(mt.sgd(0.05, momentum=0.9), every=4, warmup=3),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.05, 0.9), every=4, warmup=3),
    ),
    "post_local_sgd, adamw": Recipe(
        lambda: mt.post_local_sgd(mt.adamw(0.05, weight_decay=0.1), every=3, warmup=2),
        lambda theta, grad: ref_local(theta, grad, NumpyAdamW(0.05, 0.1), every=3, warmup=2),
    ),
    "local_sgd, lion": Recipe(
        lambda: mt.local_sgd(mt.lion(0.03, weight_decay=0.1), every=4),
        lambda theta, grad: ref_local(theta, grad, NumpyLion(0.03, 0.1), every=4),
    ),
    "local_sgd, skipped updates": Recipe(
        lambda: mt.local_sgd(mt.adamw(_falling, weight_decay=0.1), every=3),
        lambda theta, grad: ref_skipping(
            theta, grad, [NumpyAdamW(falling, 0.1) for _ in theta], every=3
        ),
        busy=lambda y: y[1] > 0,
        jax_tolerance=1e-6,
    ),
    "hierarchical_sgd": Recipe(
        lambda: mt.hierarchical_sgd(mt.sgd(0.1, momentum=0.5), {"node": 2, "world": 6}),
        lambda theta, grad: ref_hierarchical(theta, grad, NumpySGD(0.1, 0.5), node=2, world=6),
        levels=True,
    ),
    "gradient transforms": Recipe(
        lambda: mt.local_sgd(
            mt.named_chain(
                value=mt.clip(0.8),
                norm=mt.clip_by_global_norm(1.0),
                decay=mt.add_decayed_weights(0.1),
                momentum=mt.trace(0.6, nesterov=True),
                rate=mt.scale_by_schedule(_falling),
                down=mt.scale(-1.0),
                nothing=mt.identity(),
            ),
            every=3,
        ),
        lambda theta, grad: ref_local(theta, grad, NumpyClippedNesterov(), every=3),
        jax_tolerance=1e-6,
    ),
    "weighted": Recipe(
        lambda: mt.chain(
            mt.warmup_mean(2),
            mt.sgd(0.1),
            mt.periodic(mt.average_params(), every=mt.schedules.piecewise(2, {4: 1.5}), after=2),
        ),
        lambda theta, grad: ref_weighted(
            theta, grad, NumpySGD(0.1), warmup=2, due=range(4, STEPS + 1, 3)
        ),
        extra=lambda params, x, y: {"weight": abs(y[0])},
    ),
    "gradients over levels": Recipe(
        lambda: mt.chain(
            mt.warmup_mean(3, over="world", then="node"),
            mt.sgd(0.1),
            mt.periodic(mt.average_params("world"), every=5),
        ),
        lambda theta, grad: ref_levels_of_gradients(theta, grad, NumpySGD(0.1), 3, every=5),
        levels=True,
    ),
}
