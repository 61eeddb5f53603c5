"""When averagers act: every so many steps, and which of two of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime import arrays
from meantime.arrays import Array
from meantime.averaging.around import update_of
from meantime.averaging.policies import Period, Policy
from meantime.control import LAST, as_flag, cond, counter, increment
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.schedules import check_integer
from meantime.transform import EmptyState, Transform, as_transform
from meantime.tree import Tree


class PeriodicState(NamedTuple):
    """Local steps made, the steps after which the present round starts and ends (0-d int32), and
    the states of the averager and of the policy. During the warm-up the first round has yet to
    start."""

    count: Array
    start: Array
    due: Array
    averager: Any
    policy: Any = EmptyState()


class AlternateState(NamedTuple):
    """Calls made (0-d int32), and the states of both averagers."""

    count: Array
    usual: Any
    special: Any


@made
def periodic(
    averager: Any,
    every: Period,
    after: int = 0,
    first: int | None = None,
    last: int | None = None,
) -> Transform:
    r"""Let an averager act only every so many local steps.

    With steps counted from 1, a period :math:`H` and a warm-up :math:`W` the averager acts
    after the local steps :math:`W + H, W + 2H, \dots` The decision depends on the number of
    calls of `average` alone, never on the data of one replica.

    Args:
        averager: what acts; its own steps are then the rounds.
        every: the period :math:`H` in local steps, a schedule of it, or a `Policy`. A schedule
            is read once a round, at its start, with the number of local steps made so far; its
            value is rounded down and at least 1. `schedules.piecewise(4, {100: 2, 200: 2})`
            doubles the period stage by stage.
        after: the warm-up :math:`W`, in local steps.
        first: the step of the first synchronisation, instead of :math:`W + H`; the others
            follow it at the period.
        last: the step on which the last round ends: the round that would pass it is shortened,
            and none begins after it.

    `average(..., now=True)` (a bool or a 0-d bool array, the same on every replica) forces a
    synchronisation after the present step and moves no other: pass it at the end of training.
    With `counts=False` as well, the call stands for no local step: a synchronisation in between.
    An averager that names `step` is given the number of local steps made.

    Raises:
        ValueError: a period below 1, a negative warm-up, `first` or `last` below 1.
        TypeError: one of them is not an integer.

    Stich 2019 (https://arxiv.org/abs/1805.09767), algorithm 1; with a warm-up, Lin et al. 2020
    (https://arxiv.org/abs/1808.07217), section 3.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.periodic(mt.average_params(), every=4, after=2)
        >>> params, synchronised = torch.zeros(1), []
        >>> state = tx.init(params)
        >>> for step in range(1, 13):
        ...     world = mt.Recorded(mt.Solo())
        ...     params, state = tx.average(params, state, replicas=world)
        ...     synchronised += [step] if world.calls else []
        >>> synchronised
        [6, 10]
    """
    if not (callable(every) or isinstance(every, Policy)):
        check_integer("every", every, 1)
    check_integer("after", after, 0)
    for name, value in (("first", first), ("last", last)):
        if value is not None:
            check_integer(name, value, 1)
    inner = as_transform(averager)
    policy = every if isinstance(every, Policy) else None

    def at(step: Array) -> Array:
        """The period that a number or a schedule gives."""
        return every(step) if callable(every) else every

    def end_of_round(period: Array, start: Array) -> Array:
        """The step that ends a round which starts after step `start`."""
        end = start + arrays.minimum(_whole(period, start), LAST - start)
        return end if last is None else until_last(end, start)

    def until_last(end: Array, start: Array) -> Array:
        return arrays.where(start < last, arrays.minimum(end, last), LAST)

    def init(params: Tree) -> PeriodicState:
        zero = counter(params)
        start = zero + after
        period, chosen = policy.init(params) if policy else (at(start), EmptyState())
        if first is None:
            due = end_of_round(period, start)
        else:
            due = zero + (first if last is None else min(first, last))
        return PeriodicState(zero, start, due, inner.init(params), chosen)

    @forwards(inner.average, *([policy.period] if policy else []), hides=("step",))
    def average(
        params: Tree,
        state: PeriodicState,
        *,
        now: bool | Array = False,
        counts: bool | Array = True,
        **extra: Any,
    ) -> tuple[Tree, PeriodicState]:
        count = increment(state.count, counts)
        scheduled = count >= state.due
        due = scheduled if now is False else scheduled | as_flag(now)
        inherited = {**extra, "now": now, "counts": scheduled, "step": count}
        arguments = pick(inner.average, inherited)

        def synchronise(params: Tree, averager: Any) -> tuple[Tree, Any]:
            return inner.average(params, averager, **arguments)

        def wait(params: Tree, averager: Any) -> tuple[Tree, Any]:
            return params, averager

        params, averager = cond(due, synchronise, wait, params, state.averager)

        def begin(start: Array, due: Array, chosen: Any) -> tuple[Array, Array, Any]:
            if policy:
                period, chosen = policy.period(count, chosen, **pick(policy.period, extra))
            else:
                period = at(count)
            return count + 0, end_of_round(period, count), chosen  # no two leaves are one array

        def stay(start: Array, due: Array, chosen: Any) -> tuple[Array, Array, Any]:
            return start, due, chosen

        present = (state.start, state.due, state.policy)
        start, end, chosen = cond(scheduled, begin, stay, *present)
        return params, PeriodicState(count, start, end, averager, chosen)

    return Transform(init, update_of(inner, "averager"), average)


@made
def alternate(usual: Any, special: Any, every: int) -> Transform:
    r"""Call one averager, and every so many calls another instead.

    The levels of a hierarchy: `alternate(average_params("node"), average_params("world"), 4)`
    averages inside the node three times and over the world the fourth time. With `now=True` the
    special one acts.

    Args:
        usual, special: the averagers.
        every: the special one acts at calls `every`, `2 every`, ...

    Raises:
        ValueError: `every` is below 1.
        TypeError: `every` is not an integer.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.alternate(mt.average_params("node"), mt.average_params("world"), every=2)
        >>> params = torch.zeros(1)
        >>> levels = {"node": mt.Recorded(mt.Solo()), "world": mt.Recorded(mt.Solo())}
        >>> state = tx.init(params)
        >>> for _ in range(6):
        ...     params, state = tx.average(params, state, replicas=levels)
        >>> {name: len(level.calls) for name, level in levels.items()}
        {'node': 3, 'world': 3}
    """
    check_integer("every", every, 1)
    often, seldom = as_transform(usual), as_transform(special)

    def init(params: Tree) -> AlternateState:
        return AlternateState(counter(params), often.init(params), seldom.init(params))

    @forwards(often.average, seldom.average)
    def average(
        params: Tree,
        state: AlternateState,
        *,
        now: bool | Array = False,
        counts: bool | Array = True,
        **extra: Any,
    ) -> tuple[Tree, AlternateState]:
        count = increment(state.count, counts)
        extra = {**extra, "now": now, "counts": counts}

        def run_special(params: Tree, usual: Any, special: Any) -> tuple[Tree, Any, Any]:
            params, special = seldom.average(params, special, **pick(seldom.average, extra))
            return params, usual, special

        def run_usual(params: Tree, usual: Any, special: Any) -> tuple[Tree, Any, Any]:
            params, usual = often.average(params, usual, **pick(often.average, extra))
            return params, usual, special

        params, usual, special = cond(
            (count % every == 0) | as_flag(now),
            run_special,
            run_usual,
            params,
            state.usual,
            state.special,
        )
        return params, AlternateState(count, usual, special)

    return Transform(init, average=average)


def _whole(period: Array, like: Array) -> Array:
    """What a schedule returned as a period: rounded down, at least 1, within int32."""
    far = 2**30  # float32 values near the largest int32 do not fit in it
    bounded = arrays.maximum(arrays.minimum(period, far), 1)
    whole = arrays.astype(bounded, like.dtype) if arrays.is_array(bounded) else int(bounded)
    return arrays.where(whole < far, whole, LAST)
