"""Outer optimizers: SlowMo, DiLoCo and relatives."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, WORLD, NumpyAdamW, NumpySGD, Recipe, falling


def ref_slowmo(theta, grad, inner, rate, every, beta, alpha):
    anchor, u = theta[0], np.zeros_like(theta[0])
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            eta = rate(t - 1) if callable(rate) else rate
            u = beta * u + (anchor - theta.mean(0)) / eta
            anchor = anchor - alpha * eta * u
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def ref_diloco(theta, grad, inner, every, gamma, mu, first=None):
    """`first` has the step of the first synchronisation of each parameter, `every` by default."""
    anchor, b = theta[0], np.zeros_like(theta[0])
    first = np.full(anchor.shape, every) if first is None else np.array(first)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        due = (t >= first) & ((t - first) % every == 0)
        delta = anchor - theta.mean(0)
        b = np.where(due, mu * b + delta, b)
        anchor = np.where(due, anchor - gamma * (delta + mu * b), anchor)
        theta = np.where(due, anchor, theta)
        yield theta


def ref_outer(theta, grad, inner, outer, due):
    """An optimizer on the mean pseudo-gradient."""
    anchor = theta[0]
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t in due:
            anchor = outer(anchor, anchor - theta.mean(0))
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def ref_bmuf(theta, grad, inner, every, mu, zeta, nesterov):
    """The next block starts from the filtered model, or from ahead of it."""
    start = filtered = theta[0]
    delta = np.zeros_like(start)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            delta = mu * delta + zeta * (theta.mean(0) - start)
            filtered = filtered + delta
            start = filtered + mu * delta if nesterov else filtered
            theta = np.tile(start, (WORLD, 1))
        yield theta


def ref_snoo(theta, grad, inner, every, gamma, mu):
    """Every replica on its own."""
    slow, b = theta, np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            b = mu * b + slow - theta
            theta = slow = slow - gamma * (mu * b + slow - theta)
        yield theta


def ref_compressed(theta, grad, inner, every):
    """The two largest of the four differences of each replica; the others go with the next."""
    anchor, lost = theta[0], np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            total = lost + (anchor - theta)
            smallest = np.argsort(np.abs(total), axis=1)[:, :2]
            sent = total.astype(np.float32)
            np.put_along_axis(sent, smallest, 0, axis=1)
            lost = total - sent
            anchor = anchor - sent.mean(0, dtype=np.float64)
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


_falling = mt.schedules.cosine(0.2, steps=10, end=0.1)
_half = mt.codecs.topk(0.5)

RECIPES = {
    "slowmo": Recipe(
        lambda: mt.slowmo(mt.sgd(0.1), 0.1, every=3, momentum=0.6, slow_learning_rate=0.9),
        lambda theta, grad: ref_slowmo(theta, grad, NumpySGD(0.1), 0.1, 3, beta=0.6, alpha=0.9),
    ),
    "slowmo, schedule": Recipe(
        lambda: mt.slowmo(mt.sgd(_falling, momentum=0.5), _falling, every=4),
        lambda theta, grad: ref_slowmo(
            theta, grad, NumpySGD(falling, 0.5), falling, 4, beta=0.5, alpha=1.0
        ),
        jax_tolerance=1e-6,  # where a schedule of an int32 counter is float32
    ),
    "diloco": Recipe(
        lambda: mt.diloco(mt.adamw(0.05, b2=0.95, weight_decay=0.1), every=4),
        lambda theta, grad: ref_diloco(
            theta, grad, NumpyAdamW(0.05, 0.1, b2=0.95), 4, gamma=0.7, mu=0.9
        ),
    ),
    "streaming_diloco": Recipe(
        lambda: mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=2),
        lambda theta, grad: ref_diloco(
            theta, grad, NumpySGD(0.1), 4, gamma=0.7, mu=0.9, first=[4, 4, 4, 2]
        ),
    ),
    "bmuf": Recipe(
        lambda: mt.bmuf(mt.sgd(0.1), every=5, momentum=0.6, learning_rate=0.8),
        lambda theta, grad: ref_bmuf(
            theta, grad, NumpySGD(0.1), 5, mu=0.6, zeta=0.8, nesterov=True
        ),
    ),
    "bmuf, classical": Recipe(
        lambda: mt.bmuf(mt.sgd(0.1), every=5, momentum=0.6, nesterov=False),
        lambda theta, grad: ref_bmuf(
            theta, grad, NumpySGD(0.1), 5, mu=0.6, zeta=1.0, nesterov=False
        ),
    ),
    "lookahead": Recipe(
        lambda: mt.lookahead(mt.sgd(0.1, momentum=0.5), every=4),
        lambda theta, grad: ref_snoo(theta, grad, NumpySGD(0.1, 0.5), 4, gamma=0.5, mu=0.0),
    ),
    "snoo": Recipe(
        lambda: mt.snoo(mt.adamw(0.05), every=4),
        lambda theta, grad: ref_snoo(theta, grad, NumpyAdamW(0.05, 0.01), 4, gamma=0.8, mu=0.75),
    ),
    "outer adam": Recipe(
        lambda: mt.chain(
            mt.adam(0.05),
            mt.periodic(mt.outer(mt.chain(mt.mean(), mt.adam(0.1))), every=3, after=1, first=2),
        ),
        lambda theta, grad: ref_outer(
            theta, grad, NumpyAdamW(0.05), NumpyAdamW(0.1), due=range(2, STEPS + 1, 3)
        ),
    ),
    "compressed": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.periodic(
                mt.outer(mt.chain(mt.error_feedback(_half), mt.mean(codec=_half), mt.sgd(1.0))),
                every=2,
            ),
        ),
        lambda theta, grad: ref_compressed(theta, grad, NumpySGD(0.1), every=2),
        tolerance=3e-6,  # messages are float32
        jax_tolerance=3e-6,
    ),
}
