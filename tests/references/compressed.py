"""Small messages with error feedback."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.problem import STEPS, WORLD, NumpySGD, Recipe, everyone, in_nodes

ORDER = [3, 0, 1, 2]  # the bias goes before the weights in a message


def largest(x: np.ndarray, count: int) -> np.ndarray:
    """So many of each row, and zeros."""
    smallest = np.argsort(np.abs(x), axis=1)[:, : x.shape[1] - count]
    kept = x.astype(np.float32)
    np.put_along_axis(kept, smallest, 0, axis=1)
    return kept.astype(np.float64)


def frequencies(n: int) -> np.ndarray:
    """The rows of the orthonormal DCT-II."""
    k, j = np.arange(n)[:, None], np.arange(n)
    rows = np.cos(np.pi * (2 * j + 1) * k / (2 * n))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def ref_demo(theta, grad, eta, beta, count, every):
    """In nodes, which are averaged every so many steps."""
    m, d = np.zeros_like(theta), frequencies(4)
    for t in range(1, STEPS + 1):
        m = beta * m + grad(theta, t)[:, ORDER]
        q = largest(m @ d.T, count) @ d
        m = m - q
        theta = theta - eta * np.sign(in_nodes(q)[:, np.argsort(ORDER)])
        theta = everyone(theta) if t % every == 0 else theta
        yield theta


def ref_sparse_loco(theta, grad, inner, every, count, beta, gamma):
    anchor, e = theta[0], np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            e = beta * e + (anchor - theta)
            s = largest(e, count)
            e = e - s
            anchor = anchor - gamma * s.mean(0)
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


RECIPES = {
    "demo": Recipe(
        lambda: mt.chain(
            mt.demo(0.02, 0.9, codec=mt.codecs.dct(mt.codecs.topk(1 / 2)), over="node"),
            mt.periodic(mt.average_params("world"), every=7),
        ),
        lambda theta, grad: ref_demo(theta, grad, eta=0.02, beta=0.9, count=2, every=7),
        levels=True,
    ),
    "sparse_loco": Recipe(
        lambda: mt.sparse_loco(mt.sgd(0.1), every=3, fraction=0.25, decay=0.9, learning_rate=0.8),
        lambda theta, grad: ref_sparse_loco(
            *(theta, grad, NumpySGD(0.1), 3), count=1, beta=0.9, gamma=0.8
        ),
        tolerance=3e-6,  # messages are float32
        jax_tolerance=3e-6,
    ),
}
