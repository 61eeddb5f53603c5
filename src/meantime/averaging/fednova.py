"""Means of replicas that made unequal numbers of steps."""

from __future__ import annotations

from typing import NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, descended, restarted
from meantime.averaging.parameters import MeanState, guarded_mean
from meantime.control import counter, increment
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.transform import Transform
from meantime.tree import Tree, leafwise, leaves, zeros_like


class FedNovaState(NamedTuple):
    """The updates that this replica made since the last synchronisation (0-d int32), the
    parameters of that (at least float32), and the state of the mean."""

    count: Array
    anchor: Tree
    mean: MeanState


@leafwise
def _per_step(anchor: Array, params: Array, steps: Array) -> Array:
    return (anchor - params) / steps


@made
def fednova(over: str | None = None) -> Transform:
    r"""Average what the replicas did per step, so that those who made more do not count more.

    With the number :math:`\tau_k` of the updates that replica :math:`k` made since the last call of
    `average`, and weights of sum 1,

    .. math::
        \Theta \leftarrow \Theta - \bar\tau \sum_k w_k \frac{\Theta - \theta_k}{\tau_k}, \qquad
        \bar\tau = \sum_k w_k \tau_k, \qquad \theta_k \leftarrow \Theta

    Put it inside of `periodic` and before the inner optimizer:
    `chain(periodic(fednova(), every=8), sgd(0.1))`. A replica makes fewer updates than others when
    it skips some: it calls `average` after every step all the same. Where all make the same number
    this is plain averaging. (The paper counts the steps of momentum in another way; SGD is exact.)

    Args:
        over: the level of a hierarchy to average over.

    `average` takes `weight`, this replica's weight (number of samples, say). A replica of weight
    0, one that made no update and one whose parameters are not finite take no part and receive
    the result.

    Raises:
        TypeError: a leaf of the parameters is an integer or a bool; `average` is called without
            `replicas`, or they have no level `over`.

    Wang et al. 2020 (https://arxiv.org/abs/2007.07481), section 4, for local SGD.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.fednova(), mt.Vmapped(2)
        >>> def end_of_round(params, updates):
        ...     state = tx.init(torch.zeros(()))
        ...     state = state._replace(count=updates)  # which `update` counts
        ...     return tx.average(params, state, replicas=world)[0]
        >>> torch.func.vmap(end_of_round)(torch.tensor([3.0, 9.0]), torch.tensor([1, 3]))
        tensor([6., 6.])
    """

    def init(params: Tree) -> FedNovaState:
        rejected = MeanState(counter(params, local=True))
        return FedNovaState(counter(params, local=True), anchor_of(params, "fednova"), rejected)

    def update(
        updates: Tree, state: FedNovaState, params: Tree = None
    ) -> tuple[Tree, FedNovaState]:
        return updates, state._replace(count=increment(state.count))

    def average(
        params: Tree,
        state: FedNovaState,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
    ) -> tuple[Tree, FedNovaState]:
        world = resolve(replicas, over, "fednova")
        if not leaves(params):
            return params, state
        steps = state.count
        rate = _per_step(state.anchor, params, arrays.precise(arrays.maximum(steps, 1)))
        first = leaves(rate)[0]
        message = (arrays.astype(steps, arrays.wide_dtype(first.real)), rate)
        weight = arrays.where(steps > 0, 1.0 if weight is None else weight * 1.0, 0.0)
        (steps, rate), mean = guarded_mean(
            world, message, zeros_like, state.mean, weight, donate=False
        )
        anchor = descended(state.anchor, rate, steps)
        return restarted(anchor, params), FedNovaState(state.count * 0, anchor, mean)

    return Transform(init, update, average)
