"""Small messages: few values, with what was not sent kept for later."""

from __future__ import annotations

from typing import Any

from meantime.averaging.outer import outer
from meantime.averaging.parameters import mean
from meantime.averaging.periodic import periodic
from meantime.averaging.policies import Period
from meantime.codecs import Codec, dct, error_feedback, topk
from meantime.made import made
from meantime.optimizers import scale_by_learning_rate, scale_by_sign, sgd
from meantime.schedules import Hyperparameter
from meantime.transform import Transform, chain


@made
def demo(
    learning_rate: Hyperparameter,
    decay: float = 0.999,
    *,
    codec: Codec = dct(topk(1 / 128)),  # noqa: B008 (a value, which nothing changes)
    over: str | None = None,
) -> Transform:
    r"""DeMo: send the largest frequencies of the momentum, at every step.

    .. math::
        m_k &\leftarrow \beta m_k + g_k, \qquad q_k = C(m_k), \qquad m_k \leftarrow m_k - q_k \\
        \theta &\leftarrow \theta - \eta \operatorname{sign}\Big(\tfrac1K \textstyle\sum_k q_k\Big)

    A data-parallel optimizer: what is sent of the momenta is all that replicas exchange, and their
    parameters stay equal. The mean is over all replicas; the authors' code takes that of each
    frequency over those which sent it.

    Args:
        learning_rate: :math:`\eta`.
        decay: :math:`\beta`, in [0, 1].
        codec: :math:`C`; by default 32 frequencies for 4096 values, a share of the paper's.
        over: the level of a hierarchy to average over.

    Peng et al. 2024 (https://arxiv.org/abs/2411.19870), algorithm 1.

    Example:
        >>> import meantime as mt
        >>> tx = demo(3e-4)
    """
    return chain(
        error_feedback(codec, decay),
        mean(over, codec),
        scale_by_sign(),
        scale_by_learning_rate(learning_rate),
    )


@made
def sparse_loco(
    inner: Any,
    every: Period = 30,
    fraction: float = 1 / 64,
    *,
    decay: float = 0.95,
    learning_rate: Hyperparameter = 1.0,
    over: str | None = None,
    last: int | None = None,
) -> Transform:
    r"""SparseLoCo: send few values of the pseudo-gradients, and keep the others for later.

    .. math::
        e_k &\leftarrow \beta e_k + (\Theta - \theta_k), \qquad
        s_k = \operatorname{top}(e_k), \qquad e_k \leftarrow e_k - s_k \\
        \Theta &\leftarrow \Theta - \gamma\,\tfrac1K \textstyle\sum_k s_k, \qquad
        \theta_k \leftarrow \Theta

    What each replica keeps takes the place of the outer momentum.

    Args:
        inner: the optimizer of the local steps (AdamW in the paper); its state stays local.
        every: the period.
        fraction: the part of the values that is sent, of every block of 4096; see `topk`. One to
            three percent in the paper.
        decay: :math:`\beta`, in [0, 1]; with 1 nothing is lost, only late.
        learning_rate: :math:`\gamma`; a schedule counts rounds.
        over: the level of a hierarchy to average over.
        last: the step on which the last round ends.

    Sarfi et al. 2025 (https://arxiv.org/abs/2508.15706), algorithm 1, without its quantization.

    Example:
        >>> import meantime as mt
        >>> tx = sparse_loco(mt.adamw(4e-4), every=30)
    """
    codec = topk(fraction)
    rule = chain(error_feedback(codec, decay), mean(over, codec), sgd(learning_rate))
    return chain(inner, periodic(outer(rule), every, last=last))
