"""The outer rule of SlowMo."""

from __future__ import annotations

from typing import NamedTuple

from meantime.arrays import Array
from meantime.control import counter, increment, is_concrete
from meantime.made import made
from meantime.schedules import Hyperparameter, check, value_at
from meantime.transform import Transform
from meantime.tree import Tree, leafwise, zeros_like


class SlowMomentumState(NamedTuple):
    """Synchronisations made (0-d int32), and the momentum buffer, shaped like the parameters."""

    count: Array
    momentum: Tree


@leafwise(like="u")
def _momentum(delta: Array, u: Array, beta: Array, fast: Array) -> Array:
    return beta * u + delta / fast


@leafwise
def _descend(u: Array, rate: Array) -> Array:
    return -rate * u


@made
def slow_momentum(
    fast_learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.5,
    slow_learning_rate: Hyperparameter = 1.0,
) -> Transform:
    r"""Momentum on pseudo-gradients, measured in units of the inner learning rate.

    .. math:: u \leftarrow \beta u + \Delta / \eta, \qquad
        \Theta \leftarrow \Theta - \alpha\, \eta\, u

    Dividing by the inner learning rate keeps the buffer comparable when that decays.

    Args:
        fast_learning_rate: :math:`\eta`, the inner learning rate: a number, or a schedule which
            is read at the number of local steps made before the last one (the rate that step
            used). `periodic` passes the number of local steps as `step`.
        momentum: :math:`\beta`, in [0, 1].
        slow_learning_rate: :math:`\alpha`. Schedules of these two count synchronisations.

    Raises:
        ValueError: :math:`\eta` is not positive (a schedule: at the synchronisation, where the
            value can be read); another number is out of range.
        TypeError: :math:`\eta` is a schedule and `update` is called without `step`.

    Wang et al. 2020 (https://arxiv.org/abs/1910.00643), algorithm 1, lines 7 and 8.

    Example:
        >>> import torch
        >>> tx = slow_momentum(0.1, momentum=0.5)
        >>> state = tx.init(torch.zeros(1))
        >>> _, state = tx.update(torch.ones(1), state)
        >>> tx.update(torch.ones(1), state)[0]
        tensor([-1.5000])
    """
    check("fast_learning_rate", fast_learning_rate, 0)
    check("momentum", momentum, 0, 1)
    check("slow_learning_rate", slow_learning_rate, 0)

    def init(params: Tree) -> SlowMomentumState:
        return SlowMomentumState(counter(params), zeros_like(params))

    def update(
        updates: Tree,
        state: SlowMomentumState,
        params: Tree = None,
        *,
        step: Array | None = None,
    ) -> tuple[Tree, SlowMomentumState]:
        if callable(fast_learning_rate) and step is None:
            raise TypeError(
                "slow_momentum needs the number of local steps to read its schedule: put it "
                "inside periodic(outer(...), ...), which passes it, or pass step=..."
            )
        fast = value_at(fast_learning_rate, None if step is None else step - 1)
        if is_concrete(fast) and not fast > 0:
            raise ValueError(
                f"slow_momentum divides by the inner learning rate, which is {fast!r} at this "
                "synchronisation: keep it positive"
            )
        u = _momentum(updates, state.momentum, value_at(momentum, state.count), fast)
        slow = value_at(slow_learning_rate, state.count)
        return _descend(u, slow * fast), SlowMomentumState(increment(state.count), u)

    return Transform(init, update)
