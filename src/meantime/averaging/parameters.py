"""The two places where replicas meet: a mean of parameters, and a mean of updates.

Both guard the mean: a replica whose message is not finite counts with weight 0 and says so in
its state, instead of poisoning all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.codecs.base import check_codec
from meantime.control import counter, select
from meantime.made import made
from meantime.replicas.base import Levels, Replicas, resolve
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, leaves, zeros_like


class MeanState(NamedTuple):
    """How many messages of this replica were not finite and took no part; 0-d int32."""

    rejected: Array


def guarded_mean(
    world: Replicas,
    values: Tree,
    fallback: Callable[[Tree], Tree],
    state: MeanState,
    weight: Array | None,
    donate: bool,
    codec: Codec | None = None,
) -> tuple[Tree, MeanState]:
    """The mean of the finite messages; the fallback if none of them has a positive weight."""
    if not leaves(values):
        return values, state
    finite = all_finite(values)
    weight = arrays.where(finite, 1.0 if weight is None else weight * 1.0, 0.0)
    # The mean weight goes along: without any positive weight it is not positive either. Only
    # bools are sent as they are beside compressed values; of them the maximum is taken.
    sent = weight > 0
    if codec is None:  # in the dtype of values, so that it is no message of its own
        like = next((x for x in leaves(values) if arrays.is_inexact(x)), weight)
        sent = arrays.astype(weight, arrays.wide_dtype(like.real))
    present, mean = world.mean((sent, values), weight=weight, codec=codec, donate=donate)
    taken = select(present > 0, lambda: mean, lambda: fallback(mean))
    return taken, MeanState(state.rejected + ~finite)


@made
def average_params(over: str | None = None) -> Transform:
    r"""Replace the parameters by their mean over the replicas, at every call of `average`.

    .. math:: \theta_k \leftarrow \sum_j w_j \theta_j \Big/ \sum_j w_j

    Combine it with `periodic` to average every few steps. Integer and bool leaves take the
    maximum. A replica whose parameters are not all finite takes no part and receives the mean
    of the others.

    Args:
        over: the level of a hierarchy, where `replicas` is a mapping.

    `average` takes `weight`, this replica's weight (number of samples or tokens, say); a
    replica of weight 0 only receives.

    Raises:
        TypeError: `average` is called without `replicas`, or they have no level `over`.

    McDonald et al. 2009; Stich 2019 (https://arxiv.org/abs/1805.09767), algorithm 1.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.average_params()
        >>> world = mt.Vmapped(2)
        >>> def local(params, weight):
        ...     return tx.average(params, tx.init(params), replicas=world, weight=weight)[0]
        >>> torch.func.vmap(local)(torch.tensor([[0.0], [4.0]]), torch.tensor([3.0, 1.0]))
        tensor([[1.],
                [1.]])
    """

    def init(params: Tree) -> MeanState:
        return MeanState(counter(params, local=True))

    def average(
        params: Tree,
        state: MeanState,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
        donate: bool = False,
    ) -> tuple[Tree, MeanState]:
        world = resolve(replicas, over, "average_params")
        return guarded_mean(world, params, lambda mean: params, state, weight, donate)

    return Transform(init, average=average)


@made
def mean(over: str | None = None, codec: Codec | None = None) -> Transform:
    r"""Replace the updates by their mean over the replicas, at every call of `update`.

    .. math:: u_k \leftarrow \sum_j w_j u_j \Big/ \sum_j w_j

    With a codec :math:`C` it is :math:`C(\sum_j w_j C(u_j) / \sum_j w_j)`, without the outer
    :math:`C` if the codec is sparse. All floating leaves are compressed as one vector.

    The member of an update chain that communicates. On gradients it makes a data-parallel
    optimizer; inside `outer` it averages pseudo-gradients: what stands before it is local to
    the replica (clipping, compression), what stands after it is the same on all (momentum).

    A replica whose updates are not all finite takes no part and receives the mean of the
    others; if there are no others, zeros.

    Args:
        over: the level of a hierarchy, where `replicas` is a mapping.
        codec: how messages are compressed, such as `codecs.int8()`; not at all if None.

    `update` takes `weight`, this replica's weight.

    Raises:
        TypeError: `codec` is no codec; `update` is called without `replicas`, or they have no
            level `over`.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.mean(), mt.sgd(1.0))
        >>> world = mt.Vmapped(2)
        >>> def local(grads):
        ...     return tx.update(grads, tx.init(grads), grads, replicas=world)[0]
        >>> torch.func.vmap(local)(torch.tensor([1.0, 3.0]))
        tensor([-2., -2.])
    """
    if codec is not None:
        check_codec(codec, "mean")

    def init(params: Tree) -> MeanState:
        return MeanState(counter(params, local=True))

    def update(
        updates: Tree,
        state: MeanState,
        params: Tree = None,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
        donate: bool = False,
    ) -> tuple[Tree, Any]:
        world = resolve(replicas, over, "mean")
        return guarded_mean(world, updates, zeros_like, state, weight, donate, codec)

    return Transform(init, update)
