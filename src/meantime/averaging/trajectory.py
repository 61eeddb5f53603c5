"""Averages along the trajectory: of the parameters of one replica over time.

These averagers act in `average`, leave the parameters as they are and communicate nothing. Where
one stands says what it averages: in the chain, the replica's own parameters after every local
step; inside of `periodic`, those of some of the steps; in the optimizer of `outer`, the anchor
after every outer step, which is the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.control import counter, increment, select
from meantime.made import made
from meantime.schedules import Hyperparameter, check, check_integer, value_at
from meantime.state import find
from meantime.transform import Transform
from meantime.tree import Tree, copy, leafwise, zeros_like


class TrajectoryState(NamedTuple):
    """How many snapshots were taken (0-d int32), their average (at least float32; zeros before
    the first), and for `lawa` the last snapshots themselves, the oldest first."""

    count: Array
    average: Tree
    recent: tuple[Tree, ...] = ()


@leafwise
def _towards(average: Array, params: Array, rate: Array) -> Array:
    return average + rate * (params - average)


@leafwise
def _sum(total: Array, params: Array) -> Array:
    return total + params


@leafwise
def _quotient(total: Array, count: Array) -> Array:
    return total / count


@made
def ema(decay: Hyperparameter, warmup: bool = False) -> Transform:
    r"""Keep an exponential moving average of the parameters.

    .. math:: \bar\theta_1 = \theta_1, \qquad
        \bar\theta_t = d\,\bar\theta_{t-1} + (1 - d)\,\theta_t

    Args:
        decay: :math:`d`, in [0, 1]; a schedule counts the snapshots taken before.
        warmup: use :math:`\min(d, (1 + n) / (10 + n))` after :math:`n` snapshots, so that the
            average forgets the first ones sooner.

    One snapshot is taken at every call of `average`, except with `counts=False`, which stands
    for no step. The average is at least float32, whatever the dtype of the parameters; integer
    and bool leaves are copied. See `averaged_params` for its value.

    Raises:
        ValueError: `decay` is outside of [0, 1].

    Polyak & Juditsky 1992 (https://doi.org/10.1137/0330046) on averaging; the first snapshot is
    copied as in `torch.optim.swa_utils.AveragedModel`.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.sgd(1.0), mt.ema(0.75))
        >>> params = torch.tensor([0.0])
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     params, state = mt.step(tx, torch.tensor([-4.0]), params, state)
        >>> params, mt.averaged_params(state, params)
        (tensor([8.]), tensor([5.]))
    """
    check("decay", decay, 0, 1)

    def rate(count: Array) -> Array:
        kept = value_at(decay, count)
        if warmup:
            kept = arrays.minimum((1.0 + count) / (10.0 + count), kept)
        return 1.0 - kept * arrays.precise(count > 0)  # 1 for the first snapshot

    return _running(rate)


@made
def swa() -> Transform:
    r"""Keep the plain mean of the parameters of all calls (stochastic weight averaging).

    .. math:: \bar\theta_n = \tfrac1n \textstyle\sum_{i \le n} \theta_i

    `periodic(swa(), every=c, after=W)` takes a snapshot every :math:`c` steps (an epoch, say)
    once :math:`W` steps are made. Snapshots, dtypes and integer leaves are those of `ema`.

    Izmailov et al. 2018 (https://arxiv.org/abs/1803.05407), algorithm 1.

    Example:
        >>> import torch, meantime as mt
        >>> tx, params = mt.swa(), torch.zeros(1)
        >>> state = tx.init(params)
        >>> for value in (1.0, 2.0, 6.0):
        ...     params, state = tx.average(torch.tensor([value]), state)
        >>> mt.averaged_params(state, params)
        tensor([3.])
    """
    return _running(lambda count: 1.0 / (1.0 + count))


@made
def lawa(k: int) -> Transform:
    r"""Keep the mean of the last snapshots (latest weight averaging).

    .. math:: \bar\theta_n = \tfrac1k \textstyle\sum_{i = n - k + 1}^{n} \theta_i

    Before there are :math:`k` of them it is the mean of those there are.
    `periodic(lawa(k), every=c)` takes a snapshot every :math:`c` steps.

    Args:
        k: how many snapshots. They are kept in the dtype of the parameters, which takes
            :math:`k` times the memory of these besides the average.

    Snapshots, dtypes and integer leaves are those of `ema`.

    Raises:
        ValueError: `k` is below 1.
        TypeError: `k` is not an integer.

    Kaddour 2022 (https://arxiv.org/abs/2209.14981), section 2.

    Example:
        >>> import torch, meantime as mt
        >>> tx, params = mt.lawa(2), torch.zeros(1)
        >>> state = tx.init(params)
        >>> for value in (1.0, 2.0, 6.0):
        ...     params, state = tx.average(torch.tensor([value]), state)
        >>> mt.averaged_params(state, params)
        tensor([4.])
    """
    check_integer("k", k, 1)

    def init(params: Tree) -> TrajectoryState:
        recent = tuple(zeros_like(params) for _ in range(k))
        return TrajectoryState(counter(params), zeros_like(params, wide=True), recent)

    def take(params: Tree, state: TrajectoryState) -> TrajectoryState:
        recent = (*state.recent[1:], copy(params))
        total = _floating(zeros_like(params, wide=True))
        for snapshot in recent:  # those not taken yet are zeros
            total = _sum(total, _floating(snapshot))
        count = increment(state.count)
        mean = _quotient(total, arrays.minimum(arrays.precise(count), k))
        return TrajectoryState(count, _with_integers(mean, params), recent)

    return _snapshots(init, take)


def averaged_params(state: Any, params: Tree) -> Tree:
    """The average that a trajectory averager keeps, to be used in the place of `params`.

    Args:
        state: a state that holds one `TrajectoryState`, or one of `find_all(state,
            TrajectoryState)` if it holds several.
        params: the present parameters, for structure and dtypes.

    Returns:
        The average in the dtypes of the parameters; `params` before the first snapshot.

    Raises:
        LookupError: there is no such state, or there are several.
        ValueError: the average has another structure than `params`.

    Example:
        >>> import torch, meantime as mt
        >>> tx, params = mt.ema(0.5), torch.ones(1, dtype=torch.bfloat16)
        >>> state = tx.init(params)
        >>> for value in (1.0, 2.0):
        ...     _, state = tx.average(value * params, state)
        >>> mt.averaged_params(state, params)
        tensor([1.5000], dtype=torch.bfloat16)
    """
    found = find(state, TrajectoryState)

    def average(leaf: Array, mean: Array) -> Array:
        return arrays.astype(mean, leaf.dtype)

    return select(found.count > 0, lambda: tree.map(average, params, found.average), lambda: params)


def _running(rate: Callable[[Array], Array]) -> Transform:
    """Move the average towards every snapshot, by a rate that depends on how many there were
    before: 1 for the first."""

    def init(params: Tree) -> TrajectoryState:
        return TrajectoryState(counter(params), zeros_like(params, wide=True))

    def take(params: Tree, state: TrajectoryState) -> TrajectoryState:
        average, snapshot = _floating(state.average), _floating(params)
        average = _towards(average, snapshot, rate(arrays.precise(state.count)))
        return TrajectoryState(increment(state.count), _with_integers(average, params))

    return _snapshots(init, take)


def _snapshots(
    init: Callable[[Tree], TrajectoryState],
    take: Callable[[Tree, TrajectoryState], TrajectoryState],
) -> Transform:
    def average(
        params: Tree, state: TrajectoryState, *, counts: bool | Array = True
    ) -> tuple[Tree, TrajectoryState]:
        return params, select(counts, lambda: take(params, state), lambda: state)

    return Transform(init, average=average)


def _floating(params: Tree) -> Tree:
    """The leaves that have a mean, as they are now; the others are `None`."""

    def only(leaf: Array) -> Array | None:
        leaf = leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf
        return leaf if arrays.is_inexact(leaf) else None

    return tree.map(only, params)


def _with_integers(average: Tree, params: Tree) -> Tree:
    """The average of the floating leaves, with copies of all others."""
    means = iter(tree.leaves(average))
    leaves, spec = tree.flatten(params)
    return spec.unflatten([next(means) if arrays.is_inexact(x) else copy(x) for x in leaves])
