"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meantime import arrays
from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.made import made
from meantime.optimizers.decay import add_decayed_weights
from meantime.optimizers.fused import with_kernel
from meantime.optimizers.scaling import scale_by_learning_rate
from meantime.schedules import Hyperparameter, check, is_zero, value_at
from meantime.transform import Transform, chain
from meantime.tree import Tree, leafwise, zeros_like


class TraceState(NamedTuple):
    """The momentum buffer, shaped like the parameters, and the number of updates made."""

    count: Array
    trace: Tree


@leafwise(like="buffer")
def _accumulate(g: Array, buffer: Array, momentum: Array, gain: Array) -> Array:
    return momentum * buffer + gain * g


@leafwise
def _look_ahead(g: Array, buffer: Array, momentum: Array) -> Array:
    return g + momentum * buffer


@made
def trace(
    decay: Hyperparameter, nesterov: bool = False, dampening: Hyperparameter = 0.0
) -> Transform:
    r"""Accumulate a decaying sum of updates (heavy-ball or Nesterov momentum).

    .. math::
        b_1 &= g_1, \qquad b_t = \mu b_{t-1} + (1 - \tau) g_t \\
        u_t &= b_t \quad\text{or, with Nesterov,}\quad u_t = g_t + \mu b_t

    The first buffer is the first gradient, undampened, as in `torch.optim.SGD`.

    Args:
        decay: :math:`\mu`, in [0, 1].
        nesterov: look ahead.
        dampening: :math:`\tau`.

    Sutskever et al. 2013 (https://proceedings.mlr.press/v28/sutskever13.html), section 2, in
    the form of `torch.optim.SGD`.

    Raises:
        ValueError: `decay` is outside [0, 1]; Nesterov momentum with dampening.

    Example:
        >>> import torch
        >>> tx = trace(0.9)
        >>> state = tx.init(torch.zeros(1))
        >>> _, state = tx.update(torch.ones(1), state)
        >>> tx.update(torch.ones(1), state)[0]
        tensor([1.9000])
    """
    check("decay", decay, 0, 1)
    undampened = is_zero(dampening)
    if nesterov and not undampened:
        raise ValueError(f"Nesterov momentum needs dampening=0, got {dampening!r}")

    def init(params: Tree) -> TraceState:
        return TraceState(counter(params, local=True), zeros_like(params))

    def update(updates: Tree, state: TraceState, params: Tree = None) -> tuple[Tree, TraceState]:
        momentum = value_at(decay, state.count)
        gain: Array = 1.0
        if not undampened:
            damped = arrays.precise(state.count > 0)
            gain = 1.0 - damped * value_at(dampening, state.count)
        buffer = _accumulate(updates, state.trace, momentum, gain)
        updates = _look_ahead(updates, buffer, momentum) if nesterov else buffer
        return updates, TraceState(increment(state.count), buffer)

    return Transform(init, update)


@made
def sgd(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.0,
    nesterov: bool = False,
    dampening: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
) -> Transform:
    r"""Stochastic gradient descent, as `torch.optim.SGD` computes it.

    .. math::
        g &\leftarrow g + \lambda\theta \\
        b &\leftarrow \mu b + (1 - \tau) g \\
        u &= -\eta\, b \quad\text{or, with Nesterov,}\quad u = -\eta\,(g + \mu b)

    Args:
        learning_rate: :math:`\eta`.
        momentum: :math:`\mu`; no buffer is kept for the number 0.
        nesterov: use Nesterov momentum.
        dampening: :math:`\tau`; the first gradient enters undampened.
        weight_decay: :math:`\lambda`, coupled (added to the gradient).

    Raises:
        ValueError: a number out of range; Nesterov without momentum or with dampening.

    Example:
        >>> import torch, meantime as mt
        >>> tx = sgd(0.1, momentum=0.9, nesterov=True)
        >>> params = torch.zeros(1)
        >>> updates, state = tx.update(torch.ones(1), tx.init(params), params)
        >>> updates
        tensor([-0.1900])
    """
    plain = is_zero(momentum)
    if nesterov and plain:
        raise ValueError("Nesterov momentum needs a momentum: pass momentum=0.9, say")
    check("weight_decay", weight_decay, 0)
    members = []
    if not is_zero(weight_decay):
        members.append(add_decayed_weights(weight_decay))
    if not plain:
        members.append(trace(momentum, nesterov, dampening))
    tx = chain(*members, scale_by_learning_rate(learning_rate))

    def kernel(columns: list[list[Tensor]], count: int) -> None:
        params, grads, *buffers = columns
        torch._fused_sgd_(
            *(params, grads, buffers[0] if buffers else []),
            weight_decay=float(value_at(weight_decay, count)),
            momentum=float(value_at(momentum, count)),
            lr=float(value_at(learning_rate, count)),
            dampening=float(value_at(dampening, count)),
            nesterov=nesterov,
            maximize=False,
            is_first_step=count == 0,
        )

    return with_kernel(tx, kernel)
