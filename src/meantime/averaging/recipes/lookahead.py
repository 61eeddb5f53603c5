"""Outer optimizers of one replica, which communicate nothing."""

from __future__ import annotations

from typing import Any

from meantime.averaging.outer import outer
from meantime.averaging.periodic import periodic
from meantime.averaging.policies import Period
from meantime.made import made
from meantime.optimizers import sgd
from meantime.schedules import Hyperparameter, is_zero
from meantime.transform import Transform, chain


@made
def lookahead(inner: Any, every: Period = 5, *, learning_rate: Hyperparameter = 0.5) -> Transform:
    r"""Lookahead: some steps forward, and a part of the way back.

    .. math::
        \Theta \leftarrow \Theta + \alpha\,(\theta - \Theta), \qquad
        \theta \leftarrow \Theta

    An outer optimizer of one replica: nothing is communicated. Of several it is `diloco` without
    momentum.

    Args:
        inner: the optimizer of the steps forward; its state is kept.
        every: how many steps forward.
        learning_rate: :math:`\alpha`; a schedule counts the times.

    Zhang et al. 2019 (https://arxiv.org/abs/1907.08610), algorithm 1.

    Example:
        >>> import torch, meantime as mt
        >>> tx, params = lookahead(mt.sgd(1.0), every=2), torch.zeros(1)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     params, state = mt.step(tx, torch.ones(1), params, state)
        >>> params
        tensor([-1.])
    """
    return snoo(inner, every, learning_rate=learning_rate, momentum=0.0)


@made
def snoo(
    inner: Any,
    every: Period = 100,
    *,
    learning_rate: Hyperparameter = 0.8,
    momentum: Hyperparameter = 0.75,
) -> Transform:
    r"""SNOO: Lookahead with Nesterov momentum, or DiLoCo of one replica.

    .. math::
        \Delta = \Theta - \theta, \qquad b \leftarrow \mu b + \Delta, \qquad
        \Theta \leftarrow \Theta - \gamma (\Delta + \mu b), \qquad \theta \leftarrow \Theta

    Nothing is communicated. The paper tunes the three numbers; the defaults are where to begin.

    Args:
        inner: the optimizer of the inner steps; its state is kept.
        every: how many of them.
        learning_rate: :math:`\gamma`; a schedule counts the times.
        momentum: :math:`\mu`; with 0 this is `lookahead`.

    Kallusky et al. 2025 (https://arxiv.org/abs/2510.15830).

    Example:
        >>> import meantime as mt
        >>> tx = snoo(mt.adamw(4e-4), every=100)
    """
    rule = sgd(learning_rate, momentum, nesterov=not is_zero(momentum))
    return chain(inner, periodic(outer(rule), every))
