"""A mean that does not wait for the others."""

from __future__ import annotations

from typing import NamedTuple

from meantime.arrays import Array
from meantime.averaging.parameters import MeanState, mean
from meantime.codecs import Codec
from meantime.control import select
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, leafwise, leaves, zeros_like


@keeps_apart(forced=True)
class EagerState(NamedTuple):
    """What the other replicas contributed to the last mean (at least float32, shaped like the
    parameters), and the state of the mean."""

    others: Tree
    mean: MeanState


@leafwise
def _joined(own: Array, others: Array, size: int) -> Array:
    return own / size + others


@leafwise(like="others")
def _others(mean: Array, own: Array, others: Array, size: int) -> Array:
    return mean - own / size


@made
def eager_mean(over: str | None = None, codec: Codec | None = None) -> Transform:
    r"""This replica's own update now, and those of the others from the last time.

    .. math::
        \hat u_k^t = \tfrac1K u_k^t + \Big(\bar u^{t-1} - \tfrac1K u_k^{t-1}\Big), \qquad
        \bar u^t = \tfrac1K \textstyle\sum_j u_j^t

    Takes the place of `mean()` in `outer(...)`: the mean :math:`\bar u^t` is used one round
    later, so that there is the whole next round to compute it. The anchors of the replicas then
    differ, by their own updates of one round.

    Args:
        over, codec: see `mean`.

    The first time there are no others yet. An update that is not finite takes no part.

    Raises:
        TypeError: see `mean`.

    Kale et al. 2025 (https://arxiv.org/abs/2502.12996), the eager updates.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.eager_mean(), mt.Vmapped(2)
        >>> def two_rounds(update):
        ...     first, state = tx.update(update, tx.init(update), replicas=world)
        ...     return first, tx.update(update, state, replicas=world)[0]
        >>> torch.func.vmap(two_rounds)(torch.tensor([2.0, 6.0]))
        (tensor([1., 3.]), tensor([4., 4.]))
    """
    everyone = mean(over, codec)

    def init(params: Tree) -> EagerState:
        return EagerState(zeros_like(params, wide=True), everyone.init(params))

    def update(
        updates: Tree,
        state: EagerState,
        params: Tree = None,
        *,
        replicas: Levels | None = None,
    ) -> tuple[Tree, EagerState]:
        if not leaves(updates):
            return updates, state
        size = resolve(replicas, over, "eager_mean").size
        # One that takes no part in the mean has nothing in it either.
        own = select(all_finite(updates), lambda: updates, lambda: zeros_like(updates))
        average, counted = everyone.update(updates, state.mean, replicas=replicas)
        joined = _joined(own, state.others, size)
        return joined, EagerState(_others(average, own, state.others, size), counted)

    return Transform(init, update)
