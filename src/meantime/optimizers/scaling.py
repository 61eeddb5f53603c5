"""Multiply updates by a number, a schedule, or minus the learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.schedules import Hyperparameter, Schedule, check, value_at
from meantime.transform import EmptyState, Transform
from meantime.tree import Tree, leafwise


class ScheduleState(NamedTuple):
    """How many updates were made; 0-d int32."""

    count: Array


@leafwise
def _scale(updates: Array, factor: Array) -> Array:
    return factor * updates


def scale(factor: float | Array) -> Transform:
    r"""Multiply by a constant: :math:`u \leftarrow c\,u`.

    Example:
        >>> import torch
        >>> tx = scale(-0.5)
        >>> tx.update(torch.ones(2), tx.init(torch.ones(2)))[0]
        tensor([-0.5000, -0.5000])
    """

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return _scale(updates, factor), state

    return Transform(lambda params: EmptyState(), update)


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

    def init(params: Tree) -> ScheduleState:
        return ScheduleState(counter(params))

    def update(
        updates: Tree, state: ScheduleState, params: Tree = None
    ) -> tuple[Tree, ScheduleState]:
        return _scale(updates, schedule(state.count)), ScheduleState(increment(state.count))

    return Transform(init, update)


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
