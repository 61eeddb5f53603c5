"""Average gradients first."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime.arrays import Array
from meantime.averaging.parameters import mean
from meantime.control import cond, counter, increment
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.schedules import check_integer
from meantime.transform import Transform, identity
from meantime.tree import Tree


class WarmupState(NamedTuple):
    """Local steps made (0-d int32), and the states of both means."""

    count: Array
    before: Any
    after: Any


@made
def warmup_mean(steps: int, over: str | None = None, then: str | None = None) -> Transform:
    r"""Average the gradients during the first local steps.

    .. math:: g_k \leftarrow \frac1K \sum_j g_j \quad\text{for } t \le W

    Put it before the inner optimizer. The local steps are counted in `average`, so that a
    replica that skips an update stays in step with the others.

    Args:
        steps: the warm-up :math:`W`, in local steps.
        over: the level that is averaged over during the warm-up.
        then: the level that is averaged over afterwards; None keeps gradients local.

    Raises:
        TypeError: `update` is called without `replicas`; `steps` is not an integer.
        ValueError: `steps` is negative.

    Lin et al. 2020 (https://arxiv.org/abs/1808.07217), section 3.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(warmup_mean(1), mt.sgd(1.0))
        >>> world = mt.Vmapped(2)
        >>> def two_steps(params, grads):
        ...     state = tx.init(params)
        ...     for _ in range(2):
        ...         params, state = mt.step(tx, grads, params, state, replicas=world)
        ...     return params
        >>> torch.func.vmap(two_steps)(torch.zeros(2), torch.tensor([1.0, 3.0]))
        tensor([-3., -5.])
    """
    check_integer("steps", steps, 0)
    before = mean(over)
    after = identity() if then is None else mean(then)

    def init(params: Tree) -> WarmupState:
        return WarmupState(counter(params), before.init(params), after.init(params))

    @forwards(before.update, after.update)
    def update(
        updates: Tree, state: WarmupState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, WarmupState]:
        def warming(updates: Tree, first: Any, second: Any) -> tuple[Tree, Any, Any]:
            updates, first = before.update(updates, first, **pick(before.update, extra))
            return updates, first, second

        def warm(updates: Tree, first: Any, second: Any) -> tuple[Tree, Any, Any]:
            updates, second = after.update(updates, second, **pick(after.update, extra))
            return updates, first, second

        updates, first, second = cond(
            state.count < steps, warming, warm, updates, state.before, state.after
        )
        return updates, WarmupState(state.count, first, second)

    def average(
        params: Tree, state: WarmupState, *, counts: bool | Array = True
    ) -> tuple[Tree, WarmupState]:
        return params, state._replace(count=increment(state.count, counts))

    return Transform(init, update, average)
