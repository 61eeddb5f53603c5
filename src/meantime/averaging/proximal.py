"""Local steps on a leash."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of
from meantime.averaging.periodic import PeriodicState
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.schedules import check
from meantime.transform import Transform, as_transform
from meantime.tree import Tree, copy, leafwise


class ProximalState(NamedTuple):
    """The parameters that the averager left (at least float32), and its state."""

    anchor: Tree
    averager: Any


@leafwise
def _pulled(updates: Array, params: Array, anchor: Array, strength: Array) -> Array:
    return updates + strength * (params - anchor)


@made
def proximal(averager: Any, strength: float) -> Transform:
    r"""Pull the local steps back to the parameters of the last synchronisation.

    .. math:: g_k \leftarrow g_k + \lambda\,(\theta_k - \Theta), \qquad
        \Theta = \text{what the averager left}

    It is the gradient of :math:`\tfrac\lambda2 \lVert\theta_k - \Theta\rVert^2`, which keeps
    replicas with unlike data together. Put it inside of `periodic` and before the inner optimizer:
    `chain(periodic(proximal(average_params(), 0.01), every=8), sgd(0.1))`.

    Args:
        averager: what synchronises the replicas.
        strength: :math:`\lambda`; with 0 this is the averager.

    Raises:
        ValueError: `strength` is negative; `update` is called without `params`.
        TypeError: a leaf of the parameters is an integer or a bool, or `averager` is a
            `periodic(...)`.

    Li et al. 2020 (https://arxiv.org/abs/1812.06127), equation 2.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.periodic(mt.proximal(mt.average_params(), 0.5), every=8), mt.sgd(1.0))
        >>> params, state = torch.zeros(1), tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     params, state = mt.step(tx, torch.ones(1), params, state, replicas=mt.Solo())
        ...     print(params)
        tensor([-1.])
        tensor([-1.5000])
        tensor([-1.7500])
    """
    check("strength", strength, 0)
    inner = as_transform(averager)

    def init(params: Tree) -> ProximalState:
        state = inner.init(params)
        if isinstance(state, PeriodicState):  # whose average is called after every step
            raise TypeError(
                f"proximal(...) takes what is called at a synchronisation, got {averager!r}: write "
                "periodic(proximal(averager, strength), every=...)"
            )
        return ProximalState(anchor_of(params, "proximal"), state)

    @forwards(inner.update)
    def update(
        updates: Tree, state: ProximalState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, ProximalState]:
        if params is None:
            raise ValueError("proximal needs the parameters: call update(grads, state, params)")
        updates, inner_state = inner.update(
            updates, state.averager, params, **pick(inner.update, extra)
        )
        pulled = _pulled(updates, params, state.anchor, strength)
        return pulled, ProximalState(state.anchor, inner_state)

    @forwards(inner.average)
    def average(params: Tree, state: ProximalState, **extra: Any) -> tuple[Tree, ProximalState]:
        params, inner_state = inner.average(params, state.averager, **pick(inner.average, extra))
        return params, ProximalState(copy(params, wide=True), inner_state)

    return Transform(init, update, average)
