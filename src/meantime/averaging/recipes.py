"""Published algorithms as compositions of a few lines, each with the paper's defaults.

Every recipe takes the inner optimizer first; `identity()` where a `torch.optim` optimizer does
the local steps. Every period is in local steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from meantime.averaging.fragments import fragments as cut
from meantime.averaging.fragments import partition
from meantime.averaging.outer import outer
from meantime.averaging.parameters import average_params, mean
from meantime.averaging.periodic import alternate, periodic
from meantime.averaging.slow_momentum import slow_momentum
from meantime.averaging.warmup import warmup_mean
from meantime.made import made
from meantime.optimizers import sgd
from meantime.schedules import Hyperparameter, Schedule, is_zero
from meantime.transform import Transform, chain


@made
def local_sgd(
    inner: Any, every: int | Schedule, *, over: str | None = None, last: int | None = None
) -> Transform:
    r"""Local SGD: average the parameters every few local steps.

    .. math:: \theta_k \leftarrow \tfrac1K \sum_j \theta_j \quad\text{after steps } H, 2H, \dots

    Args:
        inner: the optimizer of the local steps.
        every: the period :math:`H`; see `periodic`.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Zhang et al. 2016 (https://arxiv.org/abs/1606.07365); Stich 2019
    (https://arxiv.org/abs/1805.09767), algorithm 1.

    Example:
        >>> import meantime as mt
        >>> tx = local_sgd(mt.sgd(0.1), every=8)
    """
    return chain(inner, periodic(average_params(over), every, last=last))


@made
def post_local_sgd(
    inner: Any,
    every: int | Schedule = 16,
    warmup: int = 0,
    *,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""Post-local SGD: average gradients during a warm-up, parameters every few steps after it.

    .. math::
        g_k &\leftarrow \tfrac1K \textstyle\sum_j g_j && t \le W \\
        \theta_k &\leftarrow \tfrac1K \textstyle\sum_j \theta_j && t = W + H, W + 2H, \dots

    Args:
        inner: the optimizer of the local steps.
        every: the period :math:`H`; 16 in the paper's main experiments.
        warmup: the number :math:`W` of steps with averaged gradients; the paper switches at
            the first decay of the learning rate.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Lin et al. 2020 (https://arxiv.org/abs/1808.07217), section 3.

    Example:
        >>> import meantime as mt
        >>> tx = post_local_sgd(mt.sgd(0.1, momentum=0.9), every=8, warmup=100)
    """
    averager = periodic(average_params(over), every, after=warmup, last=last)
    return chain(warmup_mean(warmup, over), inner, averager)


@made
def hierarchical_sgd(
    inner: Any, every: Mapping[str, int], *, after: int = 0, last: int | None = None
) -> Transform:
    r"""Hierarchical local SGD: average often over near replicas, seldom over all.

    Args:
        inner: the optimizer of the local steps.
        every: the period of each level in local steps, for example
            `{"node": 4, "world": 16}`. Each period is a multiple of the one below it. When
            several levels are due only the highest is averaged over, which contains the others.
        after: steps before the first round.
        last: the step on which the last round of the lowest level ends.

    `average` needs `replicas` with the same names: `{"node": ..., "world": ...}`.

    Raises:
        ValueError: no level, or periods that are not multiples of each other.

    Lin et al. 2020 (https://arxiv.org/abs/1808.07217), appendix on hierarchical local SGD.

    Example:
        >>> import meantime as mt
        >>> tx = hierarchical_sgd(mt.sgd(0.1), every={"node": 4, "world": 16})
    """
    levels = sorted(every.items(), key=lambda level: level[1])
    if not levels:
        raise ValueError("every needs at least one level, for example {'node': 4, 'world': 16}")
    if any(low < 1 or high % low for (_, low), (_, high) in pairwise(levels)):
        raise ValueError(f"each period must be a multiple of the one below it, got {dict(levels)}")
    *lower, (name, period) = levels
    averager = average_params(name)
    for name, low in reversed(lower):
        averager = alternate(average_params(name), averager, every=period // low)
        period = low
    return chain(inner, periodic(averager, period, after=after, last=last))


@made
def slowmo(
    inner: Any,
    learning_rate: Hyperparameter,
    every: int | Schedule = 12,
    *,
    momentum: Hyperparameter = 0.5,
    slow_learning_rate: Hyperparameter = 1.0,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""SlowMo: a slow momentum on top of local SGD.

    .. math::
        u \leftarrow \beta u + (\Theta - \bar\theta) / \eta, \qquad
        \Theta \leftarrow \Theta - \alpha\,\eta\, u, \qquad \theta_k \leftarrow \Theta

    Args:
        inner: the optimizer of the local steps; its state is kept.
        learning_rate: :math:`\eta`, the learning rate of `inner`: the same number or schedule.
        every: the period; the paper uses 12 for its image experiments.
        momentum: :math:`\beta`; with 0 and :math:`\alpha = 1` this is local SGD.
        slow_learning_rate: :math:`\alpha`.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Wang et al. 2020 (https://arxiv.org/abs/1910.00643), algorithm 1.

    Example:
        >>> import meantime as mt
        >>> tx = slowmo(mt.sgd(0.1), learning_rate=0.1, every=12, momentum=0.5)
    """
    rule = slow_momentum(learning_rate, momentum, slow_learning_rate)
    return chain(inner, periodic(outer(chain(mean(over), rule)), every, last=last))


@made
def diloco(
    inner: Any,
    every: int | Schedule = 500,
    *,
    learning_rate: Hyperparameter = 0.7,
    momentum: Hyperparameter = 0.9,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""DiLoCo: Nesterov momentum on the mean pseudo-gradient.

    .. math::
        \Delta = \Theta - \tfrac1K \textstyle\sum_k \theta_k, \qquad
        b \leftarrow \mu b + \Delta, \qquad
        \Theta \leftarrow \Theta - \gamma (\Delta + \mu b), \qquad \theta_k \leftarrow \Theta

    Args:
        inner: the optimizer of the local steps (AdamW in the paper); its state stays local.
        every: the period :math:`H`; 500 in the paper.
        learning_rate: :math:`\gamma`, the outer learning rate; a schedule counts rounds.
        momentum: :math:`\mu`; plain outer SGD if 0.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Douillard et al. 2023 (https://arxiv.org/abs/2311.08105), algorithm 1 and section 3.1.

    Example:
        >>> import meantime as mt
        >>> tx = diloco(mt.adamw(4e-4, b2=0.95, weight_decay=0.1), every=500)
    """
    averager = _nesterov_outer(learning_rate, momentum, over)
    return chain(inner, periodic(averager, every, last=last))


@made
def streaming_diloco(
    inner: Any,
    every: int = 100,
    fragments: int = 4,
    *,
    learning_rate: Hyperparameter = 0.7,
    momentum: Hyperparameter = 0.9,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""DiLoCo on one fragment of the parameters at a time.

    The parameters are cut into :math:`P` fragments of similar size. Fragment :math:`p` is
    synchronised after the steps :math:`(p + 1) H / P + i H`, as in `diloco` with an anchor and a
    momentum of its own: the same traffic in :math:`P` times more, smaller messages.

    Args:
        inner: the optimizer of the local steps; its state stays local.
        every: the period :math:`H` of each fragment, a multiple of `fragments`.
        fragments: their number :math:`P`.
        learning_rate, momentum, over, last: see `diloco`.

    A fragment is adopted at the step at which it is sent (the paper's :math:`\tau = 0`).

    Raises:
        ValueError: the period is not a multiple of the number of fragments.

    Douillard et al. 2025 (https://arxiv.org/abs/2501.18512), section 3.

    Example:
        >>> import meantime as mt
        >>> tx = streaming_diloco(mt.adamw(4e-4), every=100, fragments=4)
    """
    labels = cut(fragments)
    if every % fragments:
        raise ValueError(f"every={every!r} must be a multiple of fragments={fragments!r}")
    averager = _nesterov_outer(learning_rate, momentum, over)
    members = {
        p: periodic(averager, every, first=(p + 1) * every // fragments, last=last)
        for p in range(fragments)
    }
    return chain(inner, partition(members, labels))


def _nesterov_outer(
    learning_rate: Hyperparameter, momentum: Hyperparameter, over: str | None
) -> Transform:
    return outer(chain(mean(over), sgd(learning_rate, momentum, nesterov=not is_zero(momentum))))
