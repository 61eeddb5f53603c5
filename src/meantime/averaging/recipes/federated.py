"""Federated learning: rounds that begin with a new inner optimizer, and a server's rule.

The replicas are the clients, all of which hold what the server does. `average` takes `weight`, this
client's weight: its number of samples, or 0 if it takes no part in this round.
"""

from __future__ import annotations

from typing import Any, Literal

from meantime.averaging.inner import restart
from meantime.averaging.outer import outer
from meantime.averaging.parameters import average_params, mean
from meantime.averaging.periodic import periodic
from meantime.averaging.policies import Period
from meantime.averaging.proximal import proximal
from meantime.made import made
from meantime.optimizers import scale_by_learning_rate, scale_by_server_moments, sgd
from meantime.schedules import Hyperparameter
from meantime.transform import Transform, chain


@made
def fedavg(
    inner: Any, every: Period, *, over: str | None = None, last: int | None = None
) -> Transform:
    r"""FedAvg: local SGD with weights, and a new inner optimizer in every round.

    .. math:: \theta_k \leftarrow \sum_j w_j \theta_j \Big/ \sum_j w_j
        \quad\text{after steps } H, 2H, \dots

    Args:
        inner: the optimizer of the local steps; its state is made anew in every round.
        every: the period :math:`H`; see `periodic`.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    McMahan et al. 2017 (https://arxiv.org/abs/1602.05629), algorithm 1. Clients that make unequal
    numbers of steps skip some updates; see `fednova`.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = fedavg(mt.sgd(1.0), every=1), mt.Vmapped(2)
        >>> def one_round(grads, samples):
        ...     state = tx.init(grads)
        ...     return mt.step(tx, grads, 0 * grads, state, replicas=world, weight=samples)[0]
        >>> torch.func.vmap(one_round)(torch.tensor([1.0, 5.0]), torch.tensor([30.0, 10.0]))
        tensor([-2., -2.])
    """
    return _rounds(inner, average_params(over), every, last)


@made
def fedprox(
    inner: Any,
    every: Period,
    strength: float,
    *,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""FedProx: FedAvg with local steps that are pulled back to where the round began.

    .. math:: g_k \leftarrow g_k + \lambda\,(\theta_k - \Theta)

    Args:
        inner, every, over, last: see `fedavg`.
        strength: :math:`\lambda`; 0.001 to 1 in the paper. With 0 this is FedAvg.

    Li et al. 2020 (https://arxiv.org/abs/1812.06127), algorithm 2.

    Example:
        >>> import meantime as mt
        >>> tx = fedprox(mt.sgd(0.1), every=20, strength=0.01)
    """
    return _rounds(inner, proximal(average_params(over), strength), every, last)


@made
def fedavgm(
    inner: Any,
    every: Period,
    *,
    learning_rate: Hyperparameter = 1.0,
    momentum: Hyperparameter = 0.9,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""FedAvgM: FedAvg with momentum on the server.

    .. math:: b \leftarrow \mu b + \Delta, \qquad \Theta \leftarrow \Theta - \gamma\,b, \qquad
        \Delta = \sum_k w_k (\Theta - \theta_k) \Big/ \sum_k w_k

    Args:
        inner, every, over, last: see `fedavg`.
        learning_rate: :math:`\gamma`; a schedule counts rounds.
        momentum: :math:`\mu`.

    Hsu, Qi & Brown 2019 (https://arxiv.org/abs/1909.06335).

    Example:
        >>> import meantime as mt
        >>> tx = fedavgm(mt.sgd(0.1), every=20)
    """
    return _rounds(inner, outer(chain(mean(over), sgd(learning_rate, momentum))), every, last)


@made
def fedadam(
    inner: Any,
    every: Period,
    learning_rate: Hyperparameter,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""FedAdam: Adam on the server, without correction of the bias.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2, \qquad
        \Theta \leftarrow \Theta - \gamma\, m / (\sqrt v + \tau)

    Args:
        inner, every, over, last: see `fedavg`.
        learning_rate: :math:`\gamma`, which the paper tunes for each task; a schedule counts
            rounds.
        b1, b2, tau: see `scale_by_server_moments`.

    Reddi et al. 2021 (https://arxiv.org/abs/2003.00295), algorithm 2.

    Example:
        >>> import meantime as mt
        >>> tx = fedadam(mt.sgd(0.1), every=20, learning_rate=0.01)
    """
    return _adaptive("adam", inner, every, learning_rate, b1, b2, tau, over, last)


@made
def fedyogi(
    inner: Any,
    every: Period,
    learning_rate: Hyperparameter,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""FedYogi: `fedadam` with a second moment that falls by small steps only.

    .. math:: v \leftarrow v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)

    Args:
        inner, every, learning_rate, b1, b2, tau, over, last: see `fedadam`.

    Reddi et al. 2021 (https://arxiv.org/abs/2003.00295), algorithm 2.

    Example:
        >>> import meantime as mt
        >>> tx = fedyogi(mt.sgd(0.1), every=20, learning_rate=0.01)
    """
    return _adaptive("yogi", inner, every, learning_rate, b1, b2, tau, over, last)


@made
def fedadagrad(
    inner: Any,
    every: Period,
    learning_rate: Hyperparameter,
    *,
    b1: float = 0.0,
    tau: float = 1e-3,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""FedAdagrad: `fedadam` with a second moment that only grows.

    .. math:: v \leftarrow v + \Delta^2

    Args:
        inner, every, learning_rate, b1, tau, over, last: see `fedadam`.

    Reddi et al. 2021 (https://arxiv.org/abs/2003.00295), algorithm 2.

    Example:
        >>> import meantime as mt
        >>> tx = fedadagrad(mt.sgd(0.1), every=20, learning_rate=0.1)
    """
    return _adaptive("adagrad", inner, every, learning_rate, b1, 0.0, tau, over, last)


def _rounds(inner: Any, averager: Transform, every: Period, last: int | None) -> Transform:
    return periodic(chain(averager, restart(inner)), every, last=last)


def _adaptive(
    rule: Literal["adam", "yogi", "adagrad"],
    inner: Any,
    every: Period,
    learning_rate: Hyperparameter,
    b1: float,
    b2: float,
    tau: float,
    over: str | None,
    last: int | None,
) -> Transform:
    moments = scale_by_server_moments(rule, b1, b2, tau)
    server = chain(mean(over), moments, scale_by_learning_rate(learning_rate))
    return _rounds(inner, outer(server), every, last)
