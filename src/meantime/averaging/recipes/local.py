"""Plain averaging."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from meantime.averaging.inner import average_state
from meantime.averaging.parameters import average_params
from meantime.averaging.periodic import alternate, periodic
from meantime.averaging.policies import Period
from meantime.averaging.warmup import warmup_mean
from meantime.made import made
from meantime.schedules import check_integer
from meantime.transform import Transform, chain


@made
def local_sgd(
    inner: Any, every: Period, *, over: str | None = None, last: int | None = None
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
    every: Period = 16,
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
def desloc(
    inner: Any,
    every: int,
    periods: Mapping[str, int] | None = None,
    *,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""DES-LOC: average the parameters often, and the moments of the inner optimizer seldom.

    .. math::
        \theta_k \leftarrow \tfrac1K \textstyle\sum_j \theta_j \ \text{every } H, \qquad
        m_k \leftarrow \tfrac1K \textstyle\sum_j m_j \ \text{every } H_m, \qquad
        v_k \leftarrow \tfrac1K \textstyle\sum_j v_j \ \text{every } H_v

    A moment changes the more slowly the closer its decay is to 1, so that it is averaged the more
    seldom. With all periods equal this is Local Adam.

    Args:
        inner: the optimizer of the local steps.
        every: the period :math:`H` of the parameters, in local steps.
        periods: those of the fields of the optimizer's state; by default Adam's, as the paper
            recommends: `{"mu": 3 * every, "nu": 6 * every}`. See `average_state`.
        over: the level of a hierarchy to average over.
        last: the step on which the last round of all ends.

    Raises:
        ValueError: a period is below 1; `init` finds no field of that name.

    Iacob et al. 2025 (https://arxiv.org/abs/2505.22549), algorithm 1.

    Example:
        >>> import meantime as mt
        >>> tx = desloc(mt.adamw(4e-4), every=64)
        >>> local_adam = desloc(mt.adam(1e-3), 64, {"mu": 64, "nu": 64})
    """
    check_integer("every", every, 1)
    if periods is None:
        periods = {"mu": 3 * every, "nu": 6 * every}
    averager = average_params(over)
    moments = {name: periodic(averager, period, last=last) for name, period in periods.items()}
    return chain(average_state(inner, moments), periodic(averager, every, last=last))
