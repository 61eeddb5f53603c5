"""The adaptive rules of federated servers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.made import made
from meantime.schedules import check, is_zero
from meantime.transform import Transform
from meantime.tree import Tree, leafwise, zeros_like


class ServerMomentsState(NamedTuple):
    """First and second moments, shaped like the parameters."""

    mu: Tree
    nu: Tree


@leafwise
def _raised(zeros: Array, value: float) -> Array:
    return zeros + value


@leafwise
def _direction(mu: Array, nu: Array, tau: float) -> Array:
    return mu / (arrays.sqrt(nu) + tau)


@made
def scale_by_server_moments(
    rule: Literal["adam", "yogi", "adagrad"],
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
) -> Transform:
    r"""Divide the mean pseudo-gradient by its root mean square, from a start that is not zero.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad
        u_t = m_t / (\sqrt{v_t} + \tau), \qquad v_0 = \tau^2 \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2 && \text{(Adam)} \\
        v_t &= v_{t-1} - (1 - \beta_2) \Delta_t^2 \operatorname{sign}(v_{t-1} - \Delta_t^2)
            && \text{(Yogi)} \\
        v_t &= v_{t-1} + \Delta_t^2 && \text{(Adagrad)}

    The rules of `fedadam`, `fedyogi` and `fedadagrad`, in the optimizer of `outer` behind `mean()`.
    Unlike `scale_by_adam` they do not correct the bias of the start: the first rounds are small
    steps.

    Args:
        rule: which second moment.
        b1, b2: decay of the moments, in [0, 1]; Adagrad has no second one.
        tau: :math:`\tau`, how adaptive the rule is: the larger, the more it is SGD.

    Raises:
        ValueError: an unknown rule; a number is out of range.

    Reddi et al. 2021 (https://arxiv.org/abs/2003.00295), algorithm 2.

    Example:
        >>> import torch
        >>> tx = scale_by_server_moments("adagrad", b1=0.0)
        >>> state = tx.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     updates, state = tx.update(torch.tensor([3.0]), state)
        >>> updates
        tensor([0.7069])
    """
    if rule not in ("adam", "yogi", "adagrad"):
        raise ValueError(f"rule must be 'adam', 'yogi' or 'adagrad', got {rule!r}")
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    check("tau", tau, 0)
    if is_zero(tau):
        raise ValueError(f"tau must be positive, got {tau!r}")

    @leafwise(like=("mu", "nu"))
    def moments(g: Array, mu: Array, nu: Array) -> tuple[Array, Array]:
        mu, square = b1 * mu + (1 - b1) * g, g * g
        if rule == "adam":
            return mu, b2 * nu + (1 - b2) * square
        if rule == "yogi":
            return mu, nu - (1 - b2) * square * arrays.sign(nu - square)
        return mu, nu + square

    def init(params: Tree) -> ServerMomentsState:
        return ServerMomentsState(zeros_like(params), _raised(zeros_like(params), tau**2))

    def update(
        updates: Tree, state: ServerMomentsState, params: Tree = None
    ) -> tuple[Tree, ServerMomentsState]:
        mu, nu = moments(updates, state.mu, state.nu)
        return _direction(mu, nu, tau), ServerMomentsState(mu, nu)

    return Transform(init, update)
