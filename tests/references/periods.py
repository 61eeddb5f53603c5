"""Periods that change during training."""

from __future__ import annotations

import math

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, NumpySGD, Recipe, data, everyone, falling, loss


def losses(theta: np.ndarray, t: int) -> np.ndarray:
    """Of each replica, on its batch of step t (from 1)."""
    x, y = (a[:, t - 1] for a in data())
    rows = zip(theta, x, y, strict=True)
    return np.array([loss({"w": row[:-1], "b": row[-1]}, *batch) for row, *batch in rows])


def ref_qsr(theta, grad, inner, rate, alpha, base, power):
    start, due = 0, None
    for t in range(1, STEPS + 1):
        if due is None:
            period = max(base, math.floor((alpha / rate(start)) ** power))
            due = min(start + period, STEPS)
        theta = inner(theta, grad(theta, t))
        if t == due:
            theta, start, due = everyone(theta), t, None
        yield theta


def ref_adacomm(theta, grad, inner, tau, block):
    initial, first, due, until = tau, None, tau, block
    for t in range(1, STEPS + 1):
        value = losses(theta, t).mean()
        theta = inner(theta, grad(theta, t))
        if t == due:
            theta = everyone(theta)
            if first is None:
                first = value
            elif t >= until:
                new = math.ceil(math.sqrt(value / first) * initial)
                tau, until = new if new < tau else math.ceil(tau / 2), t + block
            due = t + tau
        yield theta


_falling = mt.schedules.cosine(0.2, steps=10, end=0.1)

RECIPES = {
    "qsr": Recipe(
        lambda: mt.local_sgd(
            mt.sgd(_falling), every=mt.schedules.qsr(_falling, alpha=0.47, base=2), last=STEPS
        ),
        lambda theta, grad: ref_qsr(
            theta, grad, NumpySGD(falling), falling, alpha=0.47, base=2, power=2
        ),
        jax_tolerance=1e-6,
    ),
    "adacomm": Recipe(
        lambda: mt.local_sgd(mt.sgd(0.05), every=mt.adacomm(9, block=11)),
        lambda theta, grad: ref_adacomm(theta, grad, NumpySGD(0.05), tau=9, block=11),
        extra=lambda params, x, y: {"value": loss(params, x, y)},
    ),
}
