"""Lion: the sign of a momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.made import made
from meantime.optimizers.decay import add_decayed_weights
from meantime.optimizers.scaling import scale_by_learning_rate
from meantime.schedules import Hyperparameter, check, is_zero, value_at
from meantime.transform import Transform, chain
from meantime.tree import Tree, leafwise, zeros_like


class LionState(NamedTuple):
    """Number of updates, and the momentum, shaped like the parameters."""

    count: Array
    mu: Tree


@leafwise(like=("g", "mu"))
def _signed(g: Array, mu: Array, b1: Array, b2: Array) -> tuple[Array, Array]:
    return arrays.sign(b1 * mu + (1 - b1) * g), b2 * mu + (1 - b2) * g


@made
def scale_by_lion(b1: Hyperparameter = 0.9, b2: Hyperparameter = 0.99) -> Transform:
    r"""The sign of the momentum, which is then moved.

    .. math::
        u_t = \operatorname{sign}\big(\beta_1 m_{t-1} + (1 - \beta_1) g_t\big), \qquad
        m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        b1, b2: decay of the momentum for the update and for the next one, in [0, 1].

    Chen et al. 2023 (https://arxiv.org/abs/2302.06675), algorithm 2.

    Example:
        >>> import torch
        >>> tx = scale_by_lion()
        >>> tx.update(torch.tensor([0.3, -20.0]), tx.init(torch.zeros(2)))[0]
        tensor([ 1., -1.])
    """
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)

    def init(params: Tree) -> LionState:
        return LionState(counter(params, local=True), zeros_like(params))

    def update(updates: Tree, state: LionState, params: Tree = None) -> tuple[Tree, LionState]:
        decay1, decay2 = value_at(b1, state.count), value_at(b2, state.count)
        updates, mu = _signed(updates, state.mu, decay1, decay2)
        return updates, LionState(increment(state.count), mu)

    return Transform(init, update)


@made
def lion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    weight_decay: Hyperparameter = 0.0,
    mask: Tree | Callable[[Tree], Tree] | None = None,
) -> Transform:
    r"""Lion: :math:`u = -\eta\,(\operatorname{sign}(\cdot) + \lambda\theta)`; see `scale_by_lion`.

    torch has no fused kernel for it: on large trees, `compile(lion(...))` and donation.

    Args:
        learning_rate: :math:`\eta`; the paper takes a third to a tenth of that of AdamW.
        b1, b2: see `scale_by_lion`.
        weight_decay: :math:`\lambda`, decoupled; three to ten times that of AdamW in the paper.
        mask: which leaves decay; see `add_decayed_weights`.

    Chen et al. 2023 (https://arxiv.org/abs/2302.06675), algorithm 2.

    Example:
        >>> import torch
        >>> tx = lion(0.1)
        >>> tx.update(torch.tensor([0.3]), tx.init(torch.zeros(1)))[0]
        tensor([-0.1000])
    """
    decayed = [] if is_zero(weight_decay) else [add_decayed_weights(weight_decay, mask)]
    return chain(scale_by_lion(b1, b2), *decayed, scale_by_learning_rate(learning_rate))
