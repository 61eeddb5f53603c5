"""Error feedback: what one message lost goes with the next."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime.arrays import Array
from meantime.codecs.base import Codec, check_codec
from meantime.codecs.layout import decoded
from meantime.control import select
from meantime.made import made
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, cast_like, leafwise, leaves, zeros_like


class ErrorFeedbackState(NamedTuple):
    """What this replica's messages have lost so far; at least float32, shaped like the
    parameters."""

    residual: Tree


@leafwise
def _compensated(residual: Array, updates: Array, decay: float) -> Array:
    return decay * residual + updates


@leafwise
def _difference(total: Array, arrived: Array) -> Array:
    return total - arrived


@made
def error_feedback(codec: Codec, decay: float = 1.0) -> Transform:
    r"""Add to the updates what earlier messages lost of them, before `mean(codec=codec)`.

    .. math:: u \leftarrow u + \beta e, \qquad e \leftarrow u - C(u)

    With :math:`\beta = 1` nothing is lost, only late: the sum of all that arrived and the
    residual :math:`e` is the sum of all updates. Updates that are not finite are not sent by
    `mean`, and leave the residual as it is.

    Args:
        codec: that of the mean, which follows immediately.
        decay: the part :math:`\beta` of the residual that is kept, in [0, 1].

    Raises:
        TypeError: `codec` is no codec.
        ValueError: `decay` is out of range.

    Seide et al. 2014, section 3; Karimireddy et al. 2019 (https://arxiv.org/abs/1901.09847),
    algorithm 2.

    Example:
        >>> import torch, meantime as mt
        >>> codec = mt.codecs.topk(0.5)
        >>> tx = mt.chain(mt.error_feedback(codec), mt.mean(codec=codec))
        >>> state = tx.init(torch.zeros(2))
        >>> for _ in range(3):
        ...     sent, state = tx.update(torch.tensor([3.0, 2.0]), state, replicas=mt.Solo())
        ...     print(sent)
        tensor([3., 0.])
        tensor([0., 4.])
        tensor([6., 0.])
    """
    check_codec(codec, "error_feedback")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay!r}")

    def init(params: Tree) -> ErrorFeedbackState:
        return ErrorFeedbackState(zeros_like(params, wide=True))

    def update(updates: Tree, state: ErrorFeedbackState, params: Tree = None) -> tuple[Tree, Any]:
        if not leaves(updates):
            return updates, state
        total = _compensated(state.residual, updates, decay)
        sent = cast_like(total, updates)
        arrived = decoded(codec, cast_like(sent, total))
        residual = select(
            all_finite(sent),
            lambda: _difference(total, arrived),
            lambda: state.residual,
        )
        return sent, ErrorFeedbackState(residual)

    return Transform(init, update)
