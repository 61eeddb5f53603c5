"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable
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
from meantime.schedules import Hyperparameter, check, value_at
from meantime.transform import Transform, chain
from meantime.tree import Tree, leafwise, zeros_like


class AdamState(NamedTuple):
    """Number of updates, and first and second moments shaped like the parameters."""

    count: Array
    mu: Tree
    nu: Tree


@leafwise(like=("mu", "nu"))
def _moments(g: Array, mu: Array, nu: Array, b1: Array, b2: Array) -> tuple[Array, Array]:
    return b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * (g * g)


@leafwise
def _direction(mu: Array, nu: Array, c1: Array, root_c2: Array, eps: Array) -> Array:
    return (mu / c1) / (arrays.sqrt(nu) / root_c2 + eps)


def _debias(decay: Array, count: Array) -> Array:
    """1 - decay ** count. In float32 the plain formula loses four digits at the first steps."""
    return -arrays.expm1(arrays.precise(count) * arrays.log(decay))


@made
def scale_by_adam(
    b1: Hyperparameter = 0.9, b2: Hyperparameter = 0.999, eps: Hyperparameter = 1e-8
) -> Transform:
    r"""Divide the mean gradient by its root mean square.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t} / \sqrt{1 - \beta_2^t} + \epsilon}

    Args:
        b1, b2: decay of the moments, in [0, 1].
        eps: added outside of the root.

    Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), algorithm 1.

    Example:
        >>> import torch
        >>> tx = scale_by_adam()
        >>> tx.update(torch.tensor([0.3, -20.0]), tx.init(torch.zeros(2)))[0]
        tensor([ 1.0000, -1.0000])
    """
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    check("eps", eps, 0)

    def init(params: Tree) -> AdamState:
        return AdamState(counter(params, local=True), zeros_like(params), zeros_like(params))

    def update(updates: Tree, state: AdamState, params: Tree = None) -> tuple[Tree, AdamState]:
        decay1, decay2 = value_at(b1, state.count), value_at(b2, state.count)
        count = increment(state.count)
        mu, nu = _moments(updates, state.mu, state.nu, decay1, decay2)
        root = arrays.sqrt(_debias(decay2, count))
        updates = _direction(mu, nu, _debias(decay1, count), root, value_at(eps, state.count))
        return updates, AdamState(count, mu, nu)

    return Transform(init, update)


@made
def adam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
) -> Transform:
    r"""Adam: :math:`u = -\eta\,\hat m / (\sqrt{\hat v} + \epsilon)`; see `scale_by_adam`.

    Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), algorithm 1.

    Example:
        >>> import torch
        >>> tx = adam(1e-3)
        >>> tx.update(torch.tensor([0.3]), tx.init(torch.zeros(1)))[0]
        tensor([-0.0010])
    """
    tx = chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))
    return _fused(tx, torch._fused_adam_, learning_rate, b1, b2, eps, 0.0)


@made
def adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.01,
    mask: Tree | Callable[[Tree], Tree] | None = None,
) -> Transform:
    r"""Adam with decoupled weight decay.

    .. math:: u = -\eta \left( \hat m / (\sqrt{\hat v} + \epsilon) + \lambda \theta \right)

    Args:
        learning_rate: :math:`\eta`.
        b1, b2, eps: see `scale_by_adam`.
        weight_decay: :math:`\lambda`, 0.01 as in `torch.optim.AdamW`.
        mask: which leaves decay; see `add_decayed_weights`.

    Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2.

    Example:
        >>> import torch
        >>> tx = adamw(0.1, weight_decay=0.5)
        >>> params = torch.ones(1)
        >>> tx.update(torch.zeros(1), tx.init(params), params)[0]
        tensor([-0.0500])
    """
    tx = chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    if mask is not None:
        return tx
    return _fused(tx, torch._fused_adamw_, learning_rate, b1, b2, eps, weight_decay)


def _fused(
    tx: Transform,
    kernel: Callable[..., None],
    learning_rate: Hyperparameter,
    b1: Hyperparameter,
    b2: Hyperparameter,
    eps: Hyperparameter,
    weight_decay: Hyperparameter,
) -> Transform:
    def run(columns: list[list[Tensor]], count: int) -> None:
        params, grads, mu, nu = columns
        steps = [torch.full((), count + 1.0)] * len(params)
        kernel(
            *(params, grads, mu, nu, [], steps),
            lr=float(value_at(learning_rate, count)),
            beta1=float(value_at(b1, count)),
            beta2=float(value_at(b2, count)),
            weight_decay=float(value_at(weight_decay, count)),
            eps=float(value_at(eps, count)),
            amsgrad=False,
            maximize=False,
        )

    return with_kernel(tx, run)
