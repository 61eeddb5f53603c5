"""Gossip in which not every replica sends."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, restarted
from meantime.averaging.gossip import shift_exponentially, towards
from meantime.averaging.parameters import MeanState, average_params
from meantime.codecs.layout import local
from meantime.control import as_flag, cond, counter, increment
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, cast_like, leafwise, leaves


@keeps_apart()
class PushSumState(NamedTuple):
    """Calls made (0-d int32), this replica's weight (0-d, at least float32), its parameters after
    the last call (at least float32), and how many of its messages took no part."""

    count: Array
    weight: Array
    params: Tree
    mean: MeanState


@leafwise
def _moved(before: Array, handed_out: Array, params: Array, weight: Array) -> Array:
    return before + (params - handed_out) / weight


@made
def push_sum(over: str | None = None) -> Transform:
    r"""Send half of everything one holds to one replica, at every call of `average`.

    A replica holds a weight :math:`w_k`, at first 1, and :math:`x_k = w_k \theta_k`. Of both it
    keeps half and sends half to the replica :math:`2^{t \bmod \lceil \log_2 K \rceil}` places
    after it, in the call :math:`t` from 0; or it keeps all. With :math:`u_k` the local steps and
    the column stochastic matrix :math:`P` of what each sends to whom:

    .. math::
        x \leftarrow P (x + u), \qquad w \leftarrow P w, \qquad \theta_k = x_k / w_k

    :math:`\sum_k x_k` and :math:`\sum_k w_k` stay what they are whoever sends, so that the
    parameters :math:`\theta_k`, which are handed in and out, lead to the mean of all. If all
    replicas send it is `gossip("exponential")`.

    Args:
        over: the level of a hierarchy, where `replicas` is a mapping.

    `average` takes `send`, whether this replica sends in this call; True by default.
    `average(..., now=True)` takes the exact mean, :math:`\sum_k x_k / \sum_k w_k`, and all weights
    become 1: pass it at the end of training.

    `chain(sgd(0.1), push_sum())` is SGP. What is not finite is neither sent nor kept.

    Raises:
        TypeError: a leaf of the parameters is an integer or a bool; `average` is called without
            `replicas`, or they have no level `over`.

    Assran et al. 2019 (https://arxiv.org/abs/1811.10792), algorithm 1.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.push_sum(), mt.Vmapped(2)
        >>> def one_call(params, send):
        ...     params, state = tx.average(params, tx.init(params), replicas=world, send=send)
        ...     return params, state.weight
        >>> torch.func.vmap(one_call)(torch.tensor([0.0, 3.0]), torch.tensor([True, False]))
        (tensor([0., 2.]), tensor([0.5000, 1.5000]))
    """
    everyone = average_params(over)

    def init(params: Tree) -> PushSumState:
        before = anchor_of(params, "push_sum")
        return PushSumState(counter(params), _one(params), before, everyone.init(params))

    def average(
        params: Tree,
        state: PushSumState,
        *,
        replicas: Levels | None = None,
        now: bool | Array = False,
        counts: bool | Array = True,
        send: bool | Array = True,
    ) -> tuple[Tree, PushSumState]:
        world = resolve(replicas, over, "push_sum")
        before = state.params
        handed_out = cast_like(cast_like(before, params), before)
        moved = _moved(before, handed_out, params, state.weight)

        def of_all(moved: Tree, weight: Array, mean: MeanState) -> tuple[Tree, Array, MeanState]:
            moved, mean = everyone.average(moved, mean, replicas=replicas, weight=weight)
            return moved, weight * 0 + 1, mean

        def push(moved: Tree, weight: Array, mean: MeanState) -> tuple[Tree, Array, MeanState]:
            if not leaves(moved) or world.size == 1:
                return moved, weight, mean
            # In terms of parameters and weights: what is received counts as much as its weight.
            finite = all_finite(moved)
            sent = arrays.where(finite & send, weight / 2, weight * 0)
            arrived, values = shift_exponentially((sent, moved), state.count, world)
            weight = weight - sent + arrived
            share = arrays.where(finite, arrived / weight, (arrived > 0) * 1.0)
            return towards(moved, values, share), weight, MeanState(mean.rejected + ~finite)

        moved, weight, mean = cond(as_flag(now), of_all, push, moved, state.weight, state.mean)
        after = PushSumState(increment(state.count, counts), weight, moved, mean)
        return restarted(moved, params), after

    return Transform(init, average=average)


def _one(params: Tree) -> Array:
    """A 0-d one beside the parameters, as exact as they are; it differs between replicas."""
    found = [local(x) for x in leaves(params)]
    if not found:
        return counter(params, local=True) + 1.0

    def bits(x: Array) -> int:
        return int(arrays.namespace(x).finfo(arrays.wide_dtype(x.real)).bits)

    x = max(found, key=bits).real
    dtype = arrays.wide_dtype(x)
    if isinstance(x, torch.Tensor):
        return torch.ones((), dtype=dtype, device=x.device)
    return arrays.namespace(x).ones_like(x, shape=(), dtype=dtype)
