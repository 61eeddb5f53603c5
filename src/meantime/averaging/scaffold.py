"""Local steps along the gradient of all replicas."""

from __future__ import annotations

from typing import NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, descended, pseudo_gradient, restarted
from meantime.averaging.parameters import MeanState
from meantime.control import counter, increment, select
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.schedules import Hyperparameter, check, is_zero, value_at
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, leafwise, leaves, zeros_like


class ScaffoldState(NamedTuple):
    """Of this replica: the updates it made (0-d int32), the sum of their learning rates since the
    last synchronisation and the weight with which it last took part, 1 before (0-d floats), and
    its control variate. The same on all: the parameters of the last synchronisation, and the mean
    variate. Trees are at least float32. And how many messages of this replica were not finite."""

    count: Array
    distance: Array
    weight: Array
    own: Tree
    anchor: Tree
    common: Tree
    mean: MeanState


@leafwise
def _corrected(updates: Array, own: Array, common: Array) -> Array:
    return updates - own + common


@leafwise
def _renewed(own: Array, common: Array, delta: Array, distance: Array) -> Array:
    return own - common + delta / distance


@made
def scaffold(
    learning_rate: Hyperparameter, server_learning_rate: float = 1.0, over: str | None = None
) -> Transform:
    r"""Correct the local steps by how the data of this replica differ from those of all.

    Every replica knows its own mean gradient :math:`c_k` of a round, the control variate, and the
    mean :math:`c` of those of all. They correct its gradients; and at every call of `average`, with
    the learning rates :math:`\eta_t` of the updates it made since the last one,

    .. math::
        g_k &\leftarrow g_k - c_k + c \\
        c_k^+ &= c_k - c + (\Theta - \theta_k) \Big/ \textstyle\sum_t \eta_t \\
        \Theta &\leftarrow \Theta - \gamma\,\tfrac1K \textstyle\sum_k (\Theta - \theta_k), \qquad
        \theta_k \leftarrow \Theta, \qquad c \leftarrow \tfrac1K \textstyle\sum_k c_k^+

    Put it inside of `periodic` and before SGD:
    `chain(periodic(scaffold(0.1), every=8), sgd(0.1))`. Parameters and variates go in one message.

    Args:
        learning_rate: :math:`\eta`, that of the SGD that follows: the same number or schedule.
        server_learning_rate: :math:`\gamma`.
        over: the level of a hierarchy to average over.

    `average` takes `weight`, this replica's weight (number of samples, say). One of weight 0, one
    that made no update and one whose parameters are not finite take no part: their parameters do
    not count and their variates stay. These still count in :math:`c`, by the last weight.

    Raises:
        ValueError: a learning rate is negative, or that of the updates is 0.
        TypeError: a leaf of the parameters is an integer or a bool; `average` is called without
            `replicas`, or they have no level `over`.

    Karimireddy et al. 2020 (https://arxiv.org/abs/1910.06378), algorithm 1, option II.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.periodic(mt.scaffold(0.1), every=2), mt.sgd(0.1))
        >>> world = mt.Vmapped(2)
        >>> def variates(target):
        ...     params = 0 * target
        ...     state = tx.init(params)
        ...     for _ in range(200):
        ...         params, state = mt.step(tx, params - target, params, state, replicas=world)
        ...     return params, mt.find(state, mt.ScaffoldState).own
        >>> torch.func.vmap(variates)(torch.tensor([1.0, 3.0]))
        (tensor([2.0000, 2.0000]), tensor([ 1., -1.]))
    """
    check("learning_rate", learning_rate, 0)
    check("server_learning_rate", server_learning_rate, 0)
    if is_zero(learning_rate):
        raise ValueError(f"learning_rate must be positive, got {learning_rate!r}")

    def init(params: Tree) -> ScaffoldState:
        anchor, count = anchor_of(params, "scaffold"), counter(params, local=True)
        zero = _as_exact(count, anchor)
        own, common = zeros_like(anchor), zeros_like(anchor)
        rejected = MeanState(counter(params, local=True))
        return ScaffoldState(count, zero, zero + 1.0, own, anchor, common, rejected)

    def update(
        updates: Tree, state: ScaffoldState, params: Tree = None
    ) -> tuple[Tree, ScaffoldState]:
        rate = value_at(learning_rate, state.count)
        distance = arrays.astype(state.distance + rate, state.distance.dtype)
        updates = _corrected(updates, state.own, state.common)
        return updates, state._replace(count=increment(state.count), distance=distance)

    def average(
        params: Tree,
        state: ScaffoldState,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
    ) -> tuple[Tree, ScaffoldState]:
        world = resolve(replicas, over, "scaffold")
        if not leaves(params):
            return params, state
        weight = 1.0 if weight is None else weight
        moving = state.distance > 0
        delta = pseudo_gradient(state.anchor, params)
        distance = arrays.where(moving, state.distance, 1.0)
        renewed = _renewed(state.own, state.common, delta, distance)
        finite = all_finite((delta, renewed))
        present = moving & finite & (weight > 0)
        delta, own = select(
            present, lambda: (delta, renewed), lambda: (zeros_like(delta), state.own)
        )
        last = arrays.astype(arrays.where(present, weight, state.weight), state.weight.dtype)
        # All count, by the last weight, in the mean of the variates; in that of the parameters
        # those who are present, whose part goes along.
        message = (delta, _as_exact(present, delta), own)
        delta, part, common = world.mean(message, weight=last)
        rate = server_learning_rate / arrays.where(part > 0, part, 1.0)
        anchor = descended(state.anchor, delta, rate)
        mean = MeanState(state.mean.rejected + ~finite)
        after = ScaffoldState(state.count, state.distance * 0, last, own, anchor, common, mean)
        return restarted(anchor, params), after

    return Transform(init, update, average)


def _as_exact(number: Array, params: Tree) -> Array:
    """A 0-d number as a float that is as exact as the parameters."""
    like = next(iter(leaves(params)), None)
    return number * 1.0 if like is None else arrays.astype(number, arrays.wide_dtype(like.real))
