"""Averaging that leaves a whole round for the communication."""

from __future__ import annotations

from typing import NamedTuple

from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, pseudo_gradient, restarted
from meantime.averaging.parameters import MeanState, mean
from meantime.control import as_flag, select
from meantime.made import made
from meantime.replicas.base import Levels
from meantime.schedules import check
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, leafwise, zeros_like


@keeps_apart()
class OverlappedState(NamedTuple):
    """The anchor and its momentum (at least float32), and the state of the mean."""

    anchor: Tree
    momentum: Tree
    mean: MeanState


@leafwise
def _pulled(params: Array, anchor: Array, pull: Array) -> Array:
    return params - pull * (params - anchor)


@leafwise(like=("anchor", "v"))
def _anchor(delta: Array, anchor: Array, v: Array, beta: Array) -> tuple[Array, Array]:
    v = beta * v + delta
    return anchor - v, v


@made
def overlapped(pull: float = 0.6, momentum: float = 0.7, over: str | None = None) -> Transform:
    r"""Pull every replica towards an anchor that is one round old.

    At a synchronisation each replica is pulled back towards the anchor :math:`z`, and the mean of
    what they then hold moves the anchor for the *next* synchronisation:

    .. math::
        \theta_k \leftarrow \theta_k - \alpha (\theta_k - z), \qquad
        v \leftarrow \beta v + \Big(z - \tfrac1K \textstyle\sum_j \theta_j\Big), \qquad
        z \leftarrow z - v

    So there is a whole round to compute the mean, and replicas stay apart. With
    `average(..., now=True)` the anchor and all replicas become the mean of what these hold: pass
    it at the end of training.

    Args:
        pull: :math:`\alpha`, in [0, 1].
        momentum: :math:`\beta`, in [0, 1].
        over: the level of a hierarchy to average over.

    `average` takes `weight`, this replica's weight in the mean. A replica whose parameters are
    not finite takes no part.

    Raises:
        ValueError: `pull` or `momentum` is out of range.
        TypeError: a leaf of the parameters is an integer or a bool; `average` is called without
            `replicas`, or they have no level `over`.

    Wang, Liang & Joshi 2020 (https://arxiv.org/abs/2002.09539), section 3, with its momentum.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.overlapped(pull=0.5, momentum=0.0), mt.Vmapped(2)
        >>> def two_rounds(params):
        ...     first, state = tx.average(params, tx.init(0 * params), replicas=world)
        ...     return first, tx.average(first, state, replicas=world)[0]
        >>> torch.func.vmap(two_rounds)(torch.tensor([2.0, 6.0]))
        (tensor([1., 3.]), tensor([1.5000, 2.5000]))
    """
    check("pull", pull, 0, 1)
    check("momentum", momentum, 0, 1)
    everyone = mean(over)

    def init(params: Tree) -> OverlappedState:
        return OverlappedState(
            anchor_of(params, "overlapped"), zeros_like(params, wide=True), everyone.init(params)
        )

    def average(
        params: Tree,
        state: OverlappedState,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
        now: bool | Array = False,
    ) -> tuple[Tree, OverlappedState]:
        at_once = as_flag(now)
        pulled = select(at_once, lambda: params, lambda: _pulled(params, state.anchor, pull))
        delta, counted = everyone.update(
            pseudo_gradient(state.anchor, pulled), state.mean, replicas=replicas, weight=weight
        )
        anchor, momenta = select(
            at_once,
            lambda: _anchor(delta, state.anchor, zeros_like(state.momentum), 0.0),
            lambda: _anchor(delta, state.anchor, state.momentum, momentum),
        )
        params = select(at_once, lambda: restarted(anchor, params), lambda: pulled)
        return params, OverlappedState(anchor, momenta, counted)

    return Transform(init, average=average)
