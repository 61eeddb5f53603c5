"""Federated learning, and the state of the inner optimizer at a synchronisation."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, WORLD, Recipe, data, everyone, falling


def first_targets(t):
    return data().y[:, t - 1, 0]


def everybody(t):
    return np.full(WORLD, True)


def some(t):
    return first_targets(t) > -1


def equal(t):
    return np.ones(WORLD)


def samples(t):
    return abs(first_targets(t))


class Server:
    """`(anchor, mean pseudo-gradient) -> anchor`, of algorithm 2 of Reddi et al."""

    def __init__(self, second, rate, b1):
        self.second, self.rate, self.b1 = second, rate, b1
        self.m, self.v = 0.0, 1e-3**2

    def __call__(self, anchor, delta):
        self.m = self.b1 * self.m + (1 - self.b1) * -delta
        self.v = self.second(self.v, delta**2)
        return anchor + self.rate * self.m / (np.sqrt(self.v) + 1e-3)


class Momentum:
    def __init__(self, momentum):
        self.momentum, self.b = momentum, 0.0

    def __call__(self, anchor, delta):
        self.b = self.momentum * self.b + delta
        return anchor - self.b


def ref_fedopt(theta, grad, every, server, strength=0.0, weight=equal):
    """Clients with a new momentum in every round; with strength, on a leash."""
    anchor, buffer = theta[0], np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        buffer = 0.5 * buffer + grad(theta, t) + strength * (theta - anchor)
        theta = theta - 0.1 * buffer
        if t % every == 0:
            w = weight(t) / weight(t).sum()
            anchor = server(anchor, anchor - w @ theta)
            theta, buffer = np.tile(anchor, (WORLD, 1)), np.zeros_like(theta)
        yield theta


def ref_scaffold(theta, grad, every, rate, server_rate, busy, sampled):
    x, c, own = theta[0], np.zeros_like(theta[0]), np.zeros_like(theta)
    made, distance = np.zeros(WORLD), np.zeros(WORLD)
    for t in range(1, STEPS + 1):
        eta = np.array([rate(n) for n in made]) * busy(t)
        theta = theta - eta[:, None] * (grad(theta, t) - own + c)
        made, distance = made + busy(t), distance + eta
        if t % every == 0:
            chosen = np.flatnonzero(sampled(t) & (distance > 0))
            change = np.zeros_like(own)
            change[chosen] = -c + (x - theta[chosen]) / distance[chosen, None]
            if len(chosen):
                x = x + server_rate * (theta[chosen] - x).mean(0)
            own, c = own + change, c + change.sum(0) / WORLD
            theta, distance = np.tile(x, (WORLD, 1)), np.zeros(WORLD)
        yield theta


def ref_fednova(theta, grad, every, busy, weight):
    x, made = theta[0], np.zeros(WORLD)
    for t in range(1, STEPS + 1):
        theta = theta - 0.1 * busy(t)[:, None] * grad(theta, t)
        made = made + busy(t)
        if t % every == 0:
            moving = np.flatnonzero(made)
            w = weight(t)[moving] / weight(t)[moving].sum()
            d = (x - theta[moving]) / made[moving, None]
            x = x - (w @ made[moving]) * (w @ d)
            theta, made = np.tile(x, (WORLD, 1)), np.zeros(WORLD)
        yield theta


def ref_desloc(theta, grad, rate, every, first, second):
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        theta = theta - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        theta = theta if t % every else everyone(theta)
        m, v = m if t % first else everyone(m), v if t % second else everyone(v)
        yield theta


def ref_slowmo_averaging(theta, grad, rate, every, beta):
    """SlowMo that averages the momentum of the local steps."""
    anchor, u, buffer = theta[0], np.zeros_like(theta[0]), np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        buffer = 0.9 * buffer + grad(theta, t)
        theta = theta - rate * buffer
        if t % every == 0:
            u = beta * u + (anchor - theta.mean(0)) / rate
            anchor = anchor - rate * u
            theta, buffer = np.tile(anchor, (WORLD, 1)), everyone(buffer)
        yield theta


def _weight(params, x, y):
    return {"weight": abs(y[0])}


def _sampled(params, x, y):
    return {"weight": 1.0 * (y[0] > -1)}


def _busy(y):
    return y[0] > -1


_falling = mt.schedules.cosine(0.2, steps=10, end=0.1)
_momentum = mt.sgd(0.1, momentum=0.5)

RECIPES = {
    "fedavg": Recipe(
        lambda: mt.fedavg(_momentum, every=5),
        lambda theta, grad: ref_fedopt(
            theta, grad, 5, lambda anchor, delta: anchor - delta, weight=samples
        ),
        extra=_weight,
    ),
    "fedprox": Recipe(
        lambda: mt.fedprox(_momentum, every=5, strength=0.7),
        lambda theta, grad: ref_fedopt(theta, grad, 5, lambda anchor, delta: anchor - delta, 0.7),
    ),
    "fedavgm": Recipe(
        lambda: mt.fedavgm(_momentum, every=4, momentum=0.6),
        lambda theta, grad: ref_fedopt(theta, grad, 4, Momentum(0.6)),
    ),
    "fedadam": Recipe(
        lambda: mt.fedadam(_momentum, every=3, learning_rate=0.1),
        lambda theta, grad: ref_fedopt(
            theta, grad, 3, Server(lambda v, d2: 0.99 * v + 0.01 * d2, 0.1, b1=0.9)
        ),
    ),
    "fedyogi": Recipe(
        lambda: mt.fedyogi(_momentum, every=3, learning_rate=0.1),
        lambda theta, grad: ref_fedopt(
            theta, grad, 3, Server(lambda v, d2: v - 0.01 * d2 * np.sign(v - d2), 0.1, b1=0.9)
        ),
    ),
    "fedadagrad": Recipe(
        lambda: mt.fedadagrad(_momentum, every=3, learning_rate=0.5),
        lambda theta, grad: ref_fedopt(theta, grad, 3, Server(lambda v, d2: v + d2, 0.5, b1=0.0)),
        extra=lambda params, x, y: {"weight": 2.0},
    ),
    "scaffold": Recipe(
        lambda: mt.chain(mt.periodic(mt.scaffold(0.1, 0.9), every=3), mt.sgd(0.1)),
        lambda theta, grad: ref_scaffold(
            theta, grad, 3, lambda n: 0.1, 0.9, busy=some, sampled=everybody
        ),
        busy=_busy,
    ),
    "scaffold, sampled clients": Recipe(
        lambda: mt.chain(mt.periodic(mt.scaffold(_falling), every=4), mt.sgd(_falling)),
        lambda theta, grad: ref_scaffold(
            theta, grad, 4, falling, 1.0, busy=everybody, sampled=some
        ),
        extra=_sampled,
        jax_tolerance=1e-5,  # where a schedule of an int32 counter is float32
    ),
    "fednova": Recipe(
        lambda: mt.chain(mt.periodic(mt.fednova(), every=5), mt.sgd(0.1)),
        lambda theta, grad: ref_fednova(theta, grad, 5, busy=some, weight=samples),
        extra=_weight,
        busy=_busy,
    ),
    "desloc": Recipe(
        lambda: mt.desloc(mt.adam(0.05), every=2),
        lambda theta, grad: ref_desloc(theta, grad, 0.05, every=2, first=6, second=12),
    ),
    "slowmo, averaged momentum": Recipe(
        lambda: mt.periodic(
            mt.chain(
                mt.outer(mt.chain(mt.mean(), mt.slow_momentum(0.05, momentum=0.4))),
                mt.average_state(mt.sgd(0.05, momentum=0.9), {"trace": mt.average_params()}),
            ),
            every=4,
        ),
        lambda theta, grad: ref_slowmo_averaging(theta, grad, 0.05, 4, beta=0.4),
    ),
}
