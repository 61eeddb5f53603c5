"""Means with neighbours, pairs, and a common center."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, WORLD, NumpyAdamW, NumpySGD, Recipe, data

RING = sum(np.roll(np.eye(WORLD), by, 0) for by in (-1, 0, 1)) / 3
PAIRS = np.kron(np.eye(2), np.full((2, 2), 0.5))


def exponential(t: int) -> np.ndarray:
    """The matrix of the call t, from 0."""
    return (np.eye(WORLD) + np.roll(np.eye(WORLD), (1, 2)[t % 2], 0)) / 2


def ref_gossip(theta, grad, inner, matrix):
    """`matrix(t)` is what is mixed with after step t, from 1."""
    for t in range(1, STEPS + 1):
        theta = matrix(t) @ inner(theta, grad(theta, t))
        yield theta


def ref_push_sum(theta, grad, eta, sends):
    x, w = theta.copy(), np.ones((WORLD, 1))
    for t in range(1, STEPS + 1):
        x = x - eta * grad(x / w, t)
        p = np.zeros((WORLD, WORLD))
        for j in range(WORLD):
            to = (j + (1, 2)[(t - 1) % 2]) % WORLD
            share = 0.5 if sends(t)[j] else 0.0
            p[j, j], p[to, j] = 1 - share, share
        x, w = p @ x, p @ w
        yield x / w


def busy(t: int) -> np.ndarray:
    return data().y[:, t - 1, 0] < 0


def ref_elastic(theta, grad, inner, every, beta):
    center = theta[0]
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            e = beta / WORLD * (theta - center)
            theta, center = theta - e, center + e.sum(0)
        yield theta


def partners(r: int, seed: int) -> list[int]:
    """Of a tournament of four, the last of whom keeps its seat while the others move around."""

    def scrambled(x: int) -> int:
        for factor in (27791, 23157, 31307):
            x = (x % 2**16 ^ x // 2**15) * factor + 15471
        return x % 2**16 ^ x // 2**15

    first = scrambled(scrambled(r) ^ scrambled(seed)) % 3
    moved = [(first + i) % 3 for i in range(3)]
    pairs = [(moved[0], 3), (moved[1], moved[2])]
    return [next(a + b - k for a, b in pairs if k in (a, b)) for k in range(4)]


def ref_noloco(theta, grad, inner, every, alpha, beta, gamma, seed):
    phi, delta = theta.copy(), np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            other = partners(t // every - 1, seed)
            moved = theta - phi
            delta = (
                alpha * delta
                + beta / 2 * (moved + moved[other])
                - gamma * (phi - (phi + phi[other]) / 2)
            )
            phi = phi + delta
            theta = phi.copy()
        yield theta


RECIPES = {
    "gossip on a ring": Recipe(
        lambda: mt.chain(mt.sgd(0.1), mt.gossip()),
        lambda theta, grad: ref_gossip(theta, grad, NumpySGD(0.1), lambda t: RING),
    ),
    "gossip, exponential": Recipe(
        lambda: mt.chain(
            mt.sgd(0.05, momentum=0.5), mt.periodic(mt.gossip("exponential"), every=3)
        ),
        lambda theta, grad: ref_gossip(
            *(theta, grad, NumpySGD(0.05, 0.5)),
            matrix=lambda t: np.eye(WORLD) if t % 3 else exponential(t // 3 - 1),
        ),
    ),
    "gossip over levels": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.gossip(over="node"),
            mt.periodic(mt.gossip("exponential", over="world"), every=4),
        ),
        lambda theta, grad: ref_gossip(
            *(theta, grad, NumpySGD(0.1)),
            matrix=lambda t: PAIRS if t % 4 else exponential(t // 4 - 1) @ PAIRS,
        ),
        levels=True,
    ),
    "push_sum": Recipe(
        lambda: mt.chain(mt.sgd(0.05), mt.push_sum()),
        lambda theta, grad: ref_push_sum(theta, grad, 0.05, busy),
        extra=lambda params, x, y: {"send": y[0] < 0},
    ),
    "elastic": Recipe(
        lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.elastic(), every=3)),
        lambda theta, grad: ref_elastic(theta, grad, NumpySGD(0.1), every=3, beta=0.9),
    ),
    "noloco": Recipe(
        lambda: mt.chain(mt.adamw(0.05), mt.periodic(mt.noloco(seed=3), every=4)),
        lambda theta, grad: ref_noloco(
            *(theta, grad, NumpyAdamW(0.05, 0.01), 4), alpha=0.5, beta=0.7, gamma=0.7, seed=3
        ),
    ),
}
