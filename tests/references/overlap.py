"""Communication that is under way during the next local steps."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, WORLD, NumpySGD, Recipe


def ref_streaming(theta, grad, inner, every, gamma, mu, first, delay, alpha):
    """DiLoCo with, for each parameter, a step of its first synchronisation."""
    anchor, b = theta[0], np.zeros_like(theta[0])
    first = np.array(first)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        arrives = (t - delay >= first) & ((t - delay - first) % every == 0)
        theta = np.where(arrives, alpha * theta + (1 - alpha) * anchor, theta)
        due = (t >= first) & ((t - first) % every == 0)
        delta = anchor - theta.mean(0)
        b = np.where(due, mu * b + delta, b)
        anchor = np.where(due, anchor - gamma * (delta + mu * b), anchor)
        yield theta


def ref_delta(theta, grad, inner, every, delay):
    """The mean arrives as a difference from what was sent."""
    sent, mean = theta, theta.mean(0)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t > delay and (t - delay) % every == 0:
            theta = theta + (mean - sent)
        if t % every == 0:
            sent, mean = theta, theta.mean(0)
        yield theta


def ref_eager(theta, grad, inner, every, gamma, mu):
    """Every replica has an anchor of its own; the others' part of the mean is one round old."""
    anchor, b, others = theta, np.zeros_like(theta), np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            delta = anchor - theta
            mixed = delta / WORLD + others
            others = delta.mean(0) - delta / WORLD
            b = mu * b + mixed
            anchor = anchor - gamma * (mixed + mu * b)
            theta = anchor
        yield theta


def ref_overlapped(theta, grad, inner, every, alpha, beta):
    z, v = theta[0], np.zeros_like(theta[0])
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            theta = theta - alpha * (theta - z)
            v = beta * v + theta.mean(0) - z
            z = z + v
        yield theta


def ref_delayed_nesterov(theta, grad, inner, every, eta, beta, n, c):
    """Every round is one arrival, of the mean."""
    anchor, m, total = theta[0], np.zeros_like(theta[0]), np.zeros_like(theta[0])
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            g = anchor - theta.mean(0)
            total = total + g
            if (t // every) % n == 0:
                m, total = beta * m + total / n, np.zeros_like(m)
                anchor = anchor - eta * ((1 - c * n + c) * beta * m + g / n)
            else:
                anchor = anchor - eta * (c * beta * m + g / n)
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def _outer(*members):
    return mt.chain(mt.sgd(0.1), mt.periodic(mt.outer(mt.chain(*members)), every=3))


RECIPES = {
    "streaming_diloco, delayed": Recipe(
        lambda: mt.streaming_diloco(
            mt.sgd(0.1), every=6, fragments=2, pattern="strided", delay=2, merge=0.25
        ),
        lambda theta, grad: ref_streaming(
            *(theta, grad, NumpySGD(0.1), 6, 0.7, 0.9), first=[6, 6, 6, 3], delay=2, alpha=0.25
        ),
    ),
    "streaming_diloco, a round late": Recipe(
        lambda: mt.streaming_diloco(
            mt.sgd(0.1), every=4, fragments=1, delay=4, merge=0.0, momentum=0.5
        ),
        lambda theta, grad: ref_streaming(
            *(theta, grad, NumpySGD(0.1), 4, 0.7, 0.5), first=[4] * 4, delay=4, alpha=0.0
        ),
    ),
    "delayed by the delta": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.delayed(mt.periodic(mt.average_params(), every=5), steps=3, merge="delta"),
        ),
        lambda theta, grad: ref_delta(theta, grad, NumpySGD(0.1), every=5, delay=3),
    ),
    "eager_mean": Recipe(
        lambda: _outer(mt.eager_mean(), mt.sgd(0.6, momentum=0.4, nesterov=True)),
        lambda theta, grad: ref_eager(theta, grad, NumpySGD(0.1), 3, gamma=0.6, mu=0.4),
    ),
    "overlapped": Recipe(
        lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.overlapped(), every=3)),
        lambda theta, grad: ref_overlapped(theta, grad, NumpySGD(0.1), 3, alpha=0.6, beta=0.7),
    ),
    "delayed_nesterov": Recipe(
        lambda: _outer(mt.mean(), mt.delayed_nesterov(0.7, every=4, momentum=0.9, c=0.1)),
        lambda theta, grad: ref_delayed_nesterov(
            theta, grad, NumpySGD(0.1), 3, eta=0.7, beta=0.9, n=4, c=0.1
        ),
    ),
}
