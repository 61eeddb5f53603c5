"""Multiply updates by a number, a schedule, or minus the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.made import made
from meantime.schedules import Hyperparameter, Schedule, check, value_at
from meantime.transform import EmptyState, Transform
from meantime.tree import Tree, leafwise


class ScheduleState(NamedTuple):
    """How many updates were made; 0-d int32."""

    count: Array


@leafwise
def _scale(updates: Array, factor: Array) -> Array:
    return factor * updates


@leafwise
def _sign(updates: Array) -> Array:
    return arrays.sign(updates)


def with_hyperparameter(
    rule: Callable[[Tree, Array], Tree], hyperparameter: Hyperparameter
) -> Transform:
    """The transform `rule(updates, value)`; updates are counted only to read a schedule."""
    if not callable(hyperparameter):

        def constant(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            return rule(updates, hyperparameter), state

        return Transform(lambda params: EmptyState(), constant)

    def scheduled(
        updates: Tree, state: ScheduleState, params: Tree = None
    ) -> tuple[Tree, ScheduleState]:
        updates = rule(updates, value_at(hyperparameter, state.count))
        return updates, ScheduleState(increment(state.count))

    return Transform(lambda params: ScheduleState(counter(params, local=True)), scheduled)


@made
def scale(factor: Hyperparameter) -> Transform:
    r"""Multiply by a constant, or by a schedule: :math:`u \leftarrow c\,u`.

    Example:
        >>> import torch
        >>> tx = scale(-0.5)
        >>> tx.update(torch.ones(2), tx.init(torch.ones(2)))[0]
        tensor([-0.5000, -0.5000])
    """
    return with_hyperparameter(_scale, factor)


@made
def scale_by_schedule(schedule: Schedule) -> Transform:
    r"""Multiply by a schedule of the number of updates made before: :math:`u \leftarrow s(t)\,u`.

    The first update is scaled by `schedule(0)`.

    Example:
        >>> import torch, meantime as mt
        >>> tx = scale_by_schedule(mt.schedules.linear(1.0, 0.0, steps=4))
        >>> state = tx.init(torch.ones(1))
        >>> _, state = tx.update(torch.ones(1), state)
        >>> tx.update(torch.ones(1), state)[0]
        tensor([0.7500])
    """
    return with_hyperparameter(_scale, schedule)


@made
def scale_by_learning_rate(learning_rate: Hyperparameter) -> Transform:
    r"""Descend: :math:`u \leftarrow -\eta\,u`, with a number or a schedule for :math:`\eta`.

    Raises:
        ValueError: the learning rate is negative.

    Example:
        >>> import torch
        >>> tx = scale_by_learning_rate(0.1)
        >>> tx.update(torch.ones(1), tx.init(torch.ones(1)))[0]
        tensor([-0.1000])
    """
    check("learning_rate", learning_rate, 0)
    if callable(learning_rate):
        return scale_by_schedule(lambda count: -value_at(learning_rate, count))
    return scale(-learning_rate)


@made
def scale_by_sign() -> Transform:
    r"""Take the sign of every value: :math:`u \leftarrow \operatorname{sign}(u)`.

    Bernstein et al. 2018 (https://arxiv.org/abs/1802.04434), algorithm 1.

    Example:
        >>> import torch
        >>> tx = scale_by_sign()
        >>> tx.update(torch.tensor([-0.3, 0.0, 2.0]), tx.init(torch.ones(3)))[0]
        tensor([-1.,  0.,  1.])
    """

    def update(updates: Tree, state: EmptyState, params: Tree = None) -> tuple[Tree, EmptyState]:
        return _sign(updates), state

    return Transform(lambda params: EmptyState(), update)
