"""Averages along the trajectory."""

from __future__ import annotations

import numpy as np

import meantime as mt
from tests.references.local import ref_local
from tests.references.outer import ref_diloco
from tests.references.problem import STEPS, NumpySGD, Recipe


def ref_ema(trajectory, decay):
    average = None
    for theta in trajectory:
        average = theta if average is None else decay * average + (1 - decay) * theta
        yield average


def ref_mean_of_rounds(trajectory, every, last):
    """The mean of the last so many of what stands after each round; before that, as it is."""
    snapshots: list[np.ndarray] = []
    for t, theta in enumerate(trajectory, start=1):
        snapshots += [theta] if t % every == 0 else []
        yield np.mean(snapshots[-last:], axis=0) if snapshots else theta


RECIPES = {
    "ema of each replica": Recipe(
        lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.average_params(), every=3), mt.ema(0.8)),
        lambda theta, grad: ref_ema(ref_local(theta, grad, NumpySGD(0.1), every=3), 0.8),
        shown=mt.averaged_params,
    ),
    "swa of the anchor": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.periodic(
                mt.outer(mt.chain(mt.mean(), mt.sgd(0.7, 0.9, nesterov=True), mt.swa())), every=3
            ),
        ),
        lambda theta, grad: ref_mean_of_rounds(
            ref_diloco(theta, grad, NumpySGD(0.1), 3, gamma=0.7, mu=0.9), every=3, last=STEPS
        ),
        shown=mt.averaged_params,
    ),
    "lawa of the means": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1), mt.periodic(mt.chain(mt.average_params(), mt.lawa(2)), every=2)
        ),
        lambda theta, grad: ref_mean_of_rounds(
            ref_local(theta, grad, NumpySGD(0.1), every=2), every=2, last=2
        ),
        shown=mt.averaged_params,
    ),
}
