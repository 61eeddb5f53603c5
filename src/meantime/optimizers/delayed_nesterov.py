"""Nesterov momentum for gradients that arrive one at a time."""

from __future__ import annotations

from typing import NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.control import counter, increment, select
from meantime.made import made
from meantime.optimizers.scaling import scale_by_learning_rate
from meantime.schedules import Hyperparameter, check, check_integer, value_at
from meantime.transform import Transform, chain
from meantime.tree import Tree, leafwise, zeros_like


class DelayedNesterovState(NamedTuple):
    """Updates made (0-d int32), the momentum buffer and the sum of the gradients since it last
    moved, both shaped like the parameters."""

    count: Array
    momentum: Tree
    total: Tree


@leafwise
def _sum(total: Array, updates: Array) -> Array:
    return total + updates


@leafwise
def _moved(momentum: Array, total: Array, decay: Array, every: int) -> Array:
    return decay * momentum + total / every


@leafwise
def _applied(updates: Array, momentum: Array, share: Array, every: int) -> Array:
    return updates / every + share * momentum


@made
def delayed_nesterov(
    learning_rate: Hyperparameter,
    every: int,
    momentum: Hyperparameter = 0.9,
    c: float = 0.0,
) -> Transform:
    r"""Delayed Nesterov: the momentum moves once for every :math:`N` gradients.

    With the sum :math:`\Sigma` of the gradients since the momentum :math:`m` moved, for a gradient
    :math:`g`:

    .. math::
        m &\leftarrow \beta m + \Sigma / N
            && \text{at every } N\text{-th gradient} \\
        u &= -\eta \big(g / N + \sigma \beta m\big), \qquad
        \sigma = 1 - cN + c && \text{then, } c \text{ at the others}

    For an outer optimizer of replicas that do not wait for each other: one `update` for each
    pseudo-gradient that arrives, on the anchor as it is then. :math:`N` gradients of the same
    anchor move it as `sgd(learning_rate, momentum, nesterov=True)` does with their mean.

    Args:
        learning_rate: :math:`\eta`; a schedule counts gradients.
        every: :math:`N`; the number of replicas in the paper.
        momentum: :math:`\beta`, in [0, 1].
        c: the part of the momentum that is applied with each gradient in between, in
            [0, 1/N]; the paper uses 0.

    Raises:
        ValueError: a number is out of range.
        TypeError: `every` is not an integer.

    Liu et al. 2024 (https://arxiv.org/abs/2401.09135), the delayed Nesterov update.

    Example:
        >>> import torch, meantime as mt
        >>> tx, params = mt.delayed_nesterov(1.0, every=2, momentum=0.5), torch.zeros(1)
        >>> state = tx.init(params)
        >>> for gradient in (1.0, 3.0):
        ...     updates, state = tx.update(torch.tensor([gradient]), state)
        ...     print(updates)
        tensor([-0.5000])
        tensor([-2.5000])
    """
    check_integer("every", every, 1)
    check("momentum", momentum, 0, 1)
    check("c", c, 0, 1 / every)

    def init(params: Tree) -> DelayedNesterovState:
        return DelayedNesterovState(
            counter(params, local=True), zeros_like(params), zeros_like(params)
        )

    def update(
        updates: Tree, state: DelayedNesterovState, params: Tree = None
    ) -> tuple[Tree, DelayedNesterovState]:
        count, decay = increment(state.count), value_at(momentum, state.count)
        full = count % every == 0
        total = _sum(state.total, updates)
        buffer, total = select(
            full,
            lambda: (_moved(state.momentum, total, decay, every), zeros_like(total)),
            lambda: (state.momentum, total),
        )
        share = (c + (1 - c * every) * arrays.precise(full)) * decay
        return _applied(updates, buffer, share, every), DelayedNesterovState(count, buffer, total)

    return chain(Transform(init, update), scale_by_learning_rate(learning_rate))
