"""Outer optimizers: an optimizer on the mean of what all replicas did in a round."""

from __future__ import annotations

from typing import Any, Literal

from meantime.averaging.delayed import delayed
from meantime.averaging.fragments import fragments as cut
from meantime.averaging.fragments import partition
from meantime.averaging.outer import outer
from meantime.averaging.parameters import mean
from meantime.averaging.periodic import periodic
from meantime.averaging.policies import Period
from meantime.averaging.slow_momentum import slow_momentum
from meantime.codecs import Codec
from meantime.made import made
from meantime.optimizers import sgd
from meantime.schedules import Hyperparameter, check_integer, is_zero
from meantime.transform import Transform, chain


@made
def slowmo(
    inner: Any,
    learning_rate: Hyperparameter,
    every: Period = 12,
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
        inner: the optimizer of the local steps; its state is kept. See `restart` and
            `average_state` for the other choices of the paper.
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
    every: Period = 500,
    *,
    learning_rate: Hyperparameter = 0.7,
    momentum: Hyperparameter = 0.9,
    codec: Codec | None = None,
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
        codec: how the pseudo-gradients are compressed, such as `codecs.int8()`; see `mean`. Error
            feedback goes before `mean` in the composition.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Douillard et al. 2023 (https://arxiv.org/abs/2311.08105), algorithm 1 and section 3.1.

    Example:
        >>> import meantime as mt
        >>> tx = diloco(mt.adamw(4e-4, b2=0.95, weight_decay=0.1), every=500)
    """
    averager = _nesterov_outer(learning_rate, momentum, codec, over)
    return chain(inner, periodic(averager, every, last=last))


@made
def streaming_diloco(
    inner: Any,
    every: int = 100,
    fragments: int = 4,
    *,
    pattern: Literal["size", "sequential", "strided"] = "size",
    delay: int = 0,
    merge: float = 0.5,
    learning_rate: Hyperparameter = 0.7,
    momentum: Hyperparameter = 0.9,
    codec: Codec | None = None,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""DiLoCo on one fragment of the parameters at a time.

    The parameters are cut into :math:`P` fragments. Fragment :math:`p` is synchronised after the
    steps :math:`(p + 1) H / P + i H`, as in `diloco` with an anchor and a momentum of its own: the
    same traffic in :math:`P` times more, smaller messages. What is sent at step :math:`t` is
    used at step :math:`t + \tau`, when it is merged with what the replica did meanwhile:

    .. math:: \theta_{k,p} \leftarrow \alpha\,\theta_{k,p} + (1 - \alpha)\,\Theta_p

    Args:
        inner: the optimizer of the local steps; its state stays local.
        every: the period :math:`H` of each fragment, a multiple of `fragments`.
        fragments: their number :math:`P`.
        pattern: how they are cut; see `fragments`. The paper's main choice is `"strided"`.
        delay: :math:`\tau` in local steps, at most the period; 1 or 5 in the paper. With 0 a
            fragment is adopted as it is at the step at which it is sent. See `delayed`.
        merge: :math:`\alpha`, where there is a delay.
        learning_rate, momentum, codec, over, last: see `diloco`.

    Raises:
        ValueError: the period is not a multiple of the number of fragments, or shorter than the
            delay.

    Douillard et al. 2025 (https://arxiv.org/abs/2501.18512), section 3.

    Example:
        >>> import meantime as mt
        >>> tx = streaming_diloco(mt.adamw(4e-4), every=100, fragments=4)
    """
    labels = cut(fragments, pattern)
    if every % fragments:
        raise ValueError(f"every={every!r} must be a multiple of fragments={fragments!r}")
    if check_integer("delay", delay, 0) > every:
        raise ValueError(f"delay={delay!r} must be at most every={every!r}")
    averager = _nesterov_outer(learning_rate, momentum, codec, over)

    def member(p: int) -> Transform:
        first = (p + 1) * every // fragments
        return delayed(periodic(averager, every, first=first, last=last), delay, merge)

    return chain(inner, partition({p: member(p) for p in range(fragments)}, labels))


@made
def bmuf(
    inner: Any,
    every: Period = 50,
    *,
    momentum: float = 0.875,
    learning_rate: float = 1.0,
    nesterov: bool = True,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""BMUF: momentum on what a block of local steps changed.

    .. math::
        G = \tfrac1K \textstyle\sum_k \theta_k - \Theta, \qquad
        \delta \leftarrow \mu\,\delta + \zeta\,G, \qquad
        \Theta \leftarrow \Theta + \delta
        \quad\text{or, with Nesterov,}\quad
        \Theta \leftarrow \Theta + \zeta\,G + \mu\,\delta

    :math:`\Theta` is where the next block starts: with Nesterov the point ahead of the filtered
    model, so that this is `diloco` with other numbers.

    Args:
        inner: the optimizer of the local steps; its state is kept.
        every: the length of a block.
        momentum: :math:`\mu`, the block momentum; about :math:`1 - 1/K` in the paper, this is
            for 8 replicas.
        learning_rate: :math:`\zeta`, the block learning rate.
        nesterov: Nesterov or classical block momentum.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Chen & Huo 2016 (https://doi.org/10.1109/ICASSP.2016.7472805).

    Example:
        >>> import meantime as mt
        >>> tx = bmuf(mt.sgd(0.1), every=50, momentum=0.75)
    """
    rule = sgd(learning_rate, momentum, nesterov=nesterov and not is_zero(momentum))
    return chain(inner, periodic(outer(chain(mean(over), rule)), every, last=last))


def _nesterov_outer(
    learning_rate: Hyperparameter, momentum: Hyperparameter, codec: Codec | None, over: str | None
) -> Transform:
    rule = sgd(learning_rate, momentum, nesterov=not is_zero(momentum))
    return outer(chain(mean(over, codec), rule))
