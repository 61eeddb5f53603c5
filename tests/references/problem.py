"""The problem that all references solve, and what they are written with.

Linear regression on four replicas with data of their own, whose best parameters differ from
replica to replica, so that it shows whenever somebody averages too early or too late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

WORLD = 4
STEPS = 50
FEATURES = 3


class Data(NamedTuple):
    """Axes (replica, step, sample, ...)."""

    x: Any
    y: Any


def data() -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(WORLD, STEPS, 5, FEATURES))
    truth = rng.normal(size=(WORLD, FEATURES)) * 2
    y = np.einsum("ktsf,kf->kts", x, truth) + 0.1 * rng.normal(size=(WORLD, STEPS, 5))
    return Data(x, y)


def start() -> dict[str, np.ndarray]:
    return {"w": np.array([0.5, -1.0, 2.0]), "b": np.array(0.25)}


def loss(params, x, y):
    """Operators only: torch, JAX and NumPy."""
    residual = x @ params["w"] + params["b"] - y
    return (residual * residual).mean() / 2


def gradients(theta: np.ndarray, t: int) -> np.ndarray:
    """Row k: the gradient of replica k at its parameters, on its batch of step t (from 1)."""
    x, y = (a[:, t - 1] for a in data())
    residual = np.einsum("ksf,kf->ks", x, theta[:, :-1]) + theta[:, -1:] - y
    weights = np.einsum("ks,ksf->kf", residual, x) / x.shape[1]
    return np.concatenate([weights, residual.mean(1, keepdims=True)], 1)


def everyone(theta: np.ndarray) -> np.ndarray:
    return np.broadcast_to(theta.mean(0), theta.shape).copy()


def in_nodes(theta: np.ndarray) -> np.ndarray:
    return np.concatenate([everyone(theta[:2]), everyone(theta[2:])])


class NumpySGD:
    def __init__(self, rate: float | Callable[[int], float], momentum: float = 0.0):
        self.rate, self.momentum, self.buffer, self.steps = rate, momentum, None, 0

    def __call__(self, theta, g):
        rate = self.rate(self.steps) if callable(self.rate) else self.rate
        self.steps += 1
        self.buffer = g if self.buffer is None else self.momentum * self.buffer + g
        return theta - rate * self.buffer


class NumpyAdamW:
    def __init__(
        self,
        rate: float | Callable[[int], float],
        decay: float = 0.0,
        b1: float = 0.9,
        b2: float = 0.999,
    ):
        self.rate, self.decay, self.b1, self.b2 = rate, decay, b1, b2
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, theta, g):
        rate = self.rate(self.t) if callable(self.rate) else self.rate
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return theta - rate * (m / (np.sqrt(v) + 1e-8) + self.decay * theta)


def falling(step: int) -> float:
    """A learning rate, for the references."""
    return 0.1 + 0.5 * (0.2 - 0.1) * (1 + math.cos(math.pi * min(step / 10, 1)))


class Recipe(NamedTuple):
    transform: Callable[[], Any]
    reference: Callable[..., Any]
    """`(theta, gradients) -> theta after each step`."""
    levels: bool = False
    """Whether `replicas` is a mapping of a node of two and the world."""
    extra: Callable[[Any, Any, Any], dict[str, Any]] = lambda params, x, y: {}
    """Extra arguments of a step, from this replica's parameters before it and its batch."""
    busy: Callable[[Any], Any] | None = None
    """Whether this replica makes an update in this step, from the targets of its batch."""
    tolerance: float = 1e-11
    jax_tolerance: float = 1e-11
    shown: Callable[[Any, Any], Any] = lambda state, params: params
    """What is recorded, of the state and the parameters."""
