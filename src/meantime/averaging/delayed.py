"""Use what a synchronisation gave some local steps later, as if it had been under way meanwhile."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.averaging.around import update_of
from meantime.averaging.periodic import PeriodicState
from meantime.control import as_flag, cond, increment, is_concrete
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.schedules import check, check_integer
from meantime.state import keeps_apart
from meantime.transform import Transform, as_transform
from meantime.tree import Tree, copy, zeros_like


@keeps_apart()
class DelayedState(NamedTuple):
    """Local steps until what is under way arrives (0-d int32; 0 if nothing is), what will arrive,
    the parameters that were sent (only for `merge="delta"`), and the averager's state."""

    left: Array
    pending: Tree
    sent: Tree | None
    averager: Any


@made
def delayed(averager: Any, steps: int, merge: float | Literal["delta"] = 0.0) -> Transform:
    r"""Let the result of every synchronisation arrive some local steps after it was begun.

    At step :math:`t` the averager is given the parameters :math:`\theta_k(t)` and makes
    :math:`\Theta_k` of them; the replica goes on from :math:`\theta_k(t)` and at step
    :math:`t + \tau` merges what arrived with what it did meanwhile:

    .. math::
        \theta_k \leftarrow \alpha\,\theta_k(t + \tau) + (1 - \alpha)\,\Theta_k
        \qquad\text{or}\qquad
        \theta_k \leftarrow \theta_k(t + \tau) + \big(\Theta_k - \theta_k(t)\big)

    Args:
        averager: a `periodic(...)`: what is delayed is what it begins.
        steps: the delay :math:`\tau` in local steps; with 0 this is the averager itself.
        merge: :math:`\alpha`, in [0, 1]: 0 gives the steps made meanwhile up, 1 what arrives. Or
            `"delta"`, the second formula, which keeps both.

    What is under way when the next synchronisation begins, or one is forced with `now=True`,
    arrives right before it; the result of a forced one is used at once. The state holds what is
    under way, so that it is saved and resumed with everything else.

    The delay is one of the algorithm: `average` itself returns when the communication is over,
    in every world.

    Raises:
        ValueError: `steps` is negative, or `merge` is outside of [0, 1].
        TypeError: `steps` is not an integer, or `averager` is not a `periodic(...)`.

    Douillard et al. 2025 (https://arxiv.org/abs/2501.18512), on overlapped communication, for
    the first formula.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.delayed(mt.periodic(mt.average_params(), every=2), steps=1, merge=0.5)
        >>> world = mt.Vmapped(2)
        >>> def three_steps(params, move):
        ...     state = tx.init(params)
        ...     for _ in range(3):
        ...         params, state = tx.average(params + move, state, replicas=world)
        ...     return params
        >>> torch.func.vmap(three_steps)(torch.zeros(2), torch.tensor([1.0, 3.0]))
        tensor([3.5000, 6.5000])
    """
    check_integer("steps", steps, 0)
    if merge != "delta":
        check("merge", merge, 0, 1)
    inner = as_transform(averager)
    if steps == 0:
        return inner

    def merged(params: Array, pending: Array, *sent: Array) -> Array:
        if merge == 0 or not arrays.is_inexact(params):
            return copy(pending)
        if merge == "delta":
            return params + (pending - sent[0])
        return merge * params + (1 - merge) * pending

    def init(params: Tree) -> DelayedState:
        state = inner.init(params)
        if not isinstance(state, PeriodicState):
            raise TypeError(
                f"delayed(...) delays what a periodic(...) begins, got {averager!r}: write "
                "delayed(periodic(averager, every=...), steps=...)"
            )
        sent = zeros_like(params) if merge == "delta" else None
        return DelayedState(state.count + 0, zeros_like(params), sent, state)

    @forwards(inner.average)
    def average(
        params: Tree,
        state: DelayedState,
        *,
        now: bool | Array = False,
        counts: bool | Array = True,
        donate: bool = False,
        **extra: Any,
    ) -> tuple[Tree, DelayedState]:
        begins = increment(state.averager.count, counts) >= state.averager.due
        forced = as_flag(now)

        def arrive(params: Tree, left: Array) -> tuple[Tree, Array]:
            sent = () if state.sent is None else (state.sent,)
            return tree.map(merged, params, state.pending, *sent), left * 0

        left = state.left
        if not (is_concrete(left) and left == 0):  # mostly nothing is under way
            left = arrays.where(counts, arrays.maximum(left - 1, 0), left)
            arrives = (state.left > 0) & ((left == 0) | begins | forced)
            params, left = cond(arrives, arrive, lambda *same: same, params, left)
        # What is sent stays in use, so that it is not donated.
        result, averager = inner.average(
            params,
            state.averager,
            **pick(inner.average, {**extra, "now": now, "counts": counts}),
        )

        def begin(result: Tree, left: Array, pending: Tree, sent: Tree | None) -> Any:
            kept = None if sent is None else copy(params)
            return params, left * 0 + steps, copy(result), kept

        result, left, pending, sent = cond(
            begins & (forced == 0),
            begin,
            lambda *same: same,
            result,
            left,
            state.pending,
            state.sent,
        )
        return result, DelayedState(left, pending, sent, averager)

    return Transform(init, update_of(inner, "averager"), average)
