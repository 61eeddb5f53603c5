"""Means with neighbours: no message goes to all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.averaging.parameters import MeanState, average_params
from meantime.control import as_flag, cond, counter, increment, select, switch
from meantime.made import made
from meantime.replicas.base import Levels, Replicas, resolve
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, cast_like, leaves


@keeps_apart()
class GossipState(NamedTuple):
    """Calls made (0-d int32), and how many messages of this replica took no part."""

    count: Array
    mean: MeanState


@made
def gossip(topology: Literal["ring", "exponential"] = "ring", over: str | None = None) -> Transform:
    r"""Replace the parameters by their mean over a few neighbours, at every call of `average`.

    .. math:: \theta_k \leftarrow \sum_j W_{kj} \theta_j

    with :math:`W` doubly stochastic: the mean over all replicas stays what it is, and repeated
    calls lead to it.

    Args:
        topology: `"ring"`: both neighbours and the replica itself, a third each (of two replicas,
            half each). `"exponential"`: half of the replica itself and half of the one
            :math:`2^{t \bmod \lceil \log_2 K \rceil}` places before it, in the call :math:`t`
            from 0. A power of two replicas have the mean of all after :math:`\log_2 K` calls.
        over: the level of a hierarchy, where `replicas` is a mapping.

    `chain(sgd(0.1), gossip())` is D-PSGD; with `periodic(gossip(), every=...)` there are local
    steps in between. `average(..., now=True)` takes the exact mean of all replicas, as
    `average_params` does: pass it at the end of training.

    A replica whose parameters are not all finite takes no part: its neighbours give its share to
    their own parameters, and it receives those of others. Integer and bool leaves take the maximum.

    Raises:
        ValueError: there is no such topology.
        TypeError: `average` is called without `replicas`, or they have no level `over`.

    Lian et al. 2017 (https://arxiv.org/abs/1705.09056), algorithm 1; the one-peer exponential
    graph: Assran et al. 2019 (https://arxiv.org/abs/1811.10792), section 3; Ying et al. 2021
    (https://arxiv.org/abs/2110.13363).

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.gossip("exponential"), mt.Vmapped(4)
        >>> def two_calls(params):
        ...     first, state = tx.average(params, tx.init(params), replicas=world)
        ...     return first, tx.average(first, state, replicas=world)[0]
        >>> torch.func.vmap(two_calls)(torch.tensor([0.0, 2.0, 4.0, 6.0]))
        (tensor([3., 1., 3., 5.]), tensor([3., 3., 3., 3.]))
    """
    if topology not in ("ring", "exponential"):
        raise ValueError(f"topology must be 'ring' or 'exponential', got {topology!r}")
    everyone = average_params(over)

    def received(params: Tree, count: Array, world: Replicas) -> list[Tree]:
        """The parameters of the neighbours."""
        if topology == "ring":
            return [world.shift(params, by) for by in (1, -1)[: world.size - 1]]
        return [*shift_exponentially((params,), count, world)] if world.size > 1 else []

    def init(params: Tree) -> GossipState:
        return GossipState(counter(params), everyone.init(params))

    def average(
        params: Tree,
        state: GossipState,
        *,
        replicas: Levels | None = None,
        now: bool | Array = False,
        counts: bool | Array = True,
    ) -> tuple[Tree, GossipState]:
        world = resolve(replicas, over, "gossip")

        def of_all(params: Tree, mean: MeanState) -> tuple[Tree, MeanState]:
            return everyone.average(params, mean, replicas=replicas)

        def of_neighbours(params: Tree, mean: MeanState) -> tuple[Tree, MeanState]:
            if not leaves(params):
                return params, mean
            mixed = mean_with(params, received(params, state.count, world))
            return mixed, MeanState(mean.rejected + ~all_finite(params))

        params, mean = cond(as_flag(now), of_all, of_neighbours, params, state.mean)
        return params, GossipState(increment(state.count, counts), mean)

    return Transform(init, average=average)


def shift_exponentially(
    values: tuple[Tree, ...], count: Array, world: Replicas
) -> tuple[Tree, ...]:
    """From the replica `2**t` places before, with `t` the count modulo the number of such."""
    steps = [1 << t for t in range((world.size - 1).bit_length())]
    shift = [lambda *values, by=by: world.shift(values, by) for by in steps]
    return switch(count % len(steps), shift, *values)


def mean_with(own: Tree, others: Sequence[Tree]) -> Tree:
    """The mean of own values and others, of equal weights.

    Others that are not finite give their weight to own values; where these are not finite they
    are left out. Without any finite values own ones stay. Equal values stay what they are, bit
    for bit.
    """
    weight = 1 / (1 + len(others))
    finite = [arrays.precise(all_finite(values)) for values in others]
    total = arrays.precise(all_finite(own)) * (1 - weight * sum(finite))
    mean = tree.map(lambda x: arrays.astype(x, arrays.wide_dtype(x)), own)
    for values, takes_part in zip(others, finite, strict=True):
        part = weight * takes_part
        share = arrays.where(total > 0, part / (total + part), takes_part)
        total = total + part
        mean = towards(mean, values, share)
    return cast_like(mean, own)


def towards(values: Tree, others: Tree, share: Array) -> Tree:
    """`values + share (others - values)`, for a share in [0, 1]; of a share of 0 or 1, whatever is
    not taken may hold anything. Integers and bools take the maximum."""

    def between(x: Array, y: Array) -> Array:
        if not arrays.is_inexact(x):
            return arrays.maximum(x, y)
        return arrays.astype(x + share * (y - x), x.dtype)

    def others_at_most() -> Tree:
        return select(share > 0, lambda: tree.map(between, values, others), lambda: values)

    return select(share < 1, others_at_most, lambda: cast_like(others, values))
