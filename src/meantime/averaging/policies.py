"""Periods that depend on more than the step: what training says about itself.

A policy has a state, sees the extra arguments of `average` and may communicate. It has to decide
the same on every replica, or they would wait for each other forever: what differs between them,
such as the loss, is averaged first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.control import cond, counter
from meantime.made import Made, made
from meantime.replicas.base import Levels, resolve
from meantime.schedules import Schedule, check_integer
from meantime.tree import Tree


class _Functions(NamedTuple):
    init: Callable[[Tree], tuple[Array, Any]]
    period: Callable[..., tuple[Array, Any]]


class Policy(Made, _Functions):
    """Two pure functions that say how long each round is, for `periodic(every=...)`.

    Args:
        init: `(params) -> (period, state)`, with the period of the first round.
        period: `(step, state, **extra) -> (period, state)`, called on all replicas when a round
            starts, with the number of local steps made so far and with those of the extra
            arguments of `average` that it names.

    Example:
        >>> import torch, meantime as mt
        >>> doubling = mt.Policy(
        ...     lambda params: (1, torch.tensor(1)),
        ...     lambda step, last: (2 * last, 2 * last),
        ... )
        >>> tx, params, synchronised = mt.local_sgd(mt.sgd(0.1), doubling), torch.zeros(1), []
        >>> state = tx.init(params)
        >>> for step in range(1, 16):
        ...     world = mt.Recorded(mt.Solo())
        ...     params, state = tx.average(params, state, replicas=world)
        ...     synchronised += [step] if world.calls else []
        >>> synchronised
        [1, 3, 7, 15]
    """


Period = int | Schedule | Policy
"""How long rounds are, in local steps: a number, a schedule of the step, or a policy."""


class AdaCommState(NamedTuple):
    """The present period, the step from which on it may be chosen again (both 0-d int32), and the
    loss that later ones are compared with (0-d float32, infinite until there is one)."""

    period: Array
    until: Array
    first: Array


@made
def adacomm(initial: int, block: int, over: str | None = None) -> Policy:
    r"""AdaComm: communicate more often as the loss falls.

    .. math::
        \tau_l = \Big\lceil \sqrt{F_l / F_0}\; \tau_0 \Big\rceil
        \quad\text{if that is below } \tau_{l-1}, \text{ else } \lceil \tau_{l-1} / 2 \rceil

    :math:`F_l` is the loss at the first synchronisation after the :math:`l`-th block of steps,
    averaged over the replicas, and :math:`F_0` that at the first synchronisation of all. A loss
    that is not finite leaves the period as it is.

    Args:
        initial: the first period :math:`\tau_0`, in local steps.
        block: how many local steps the period is kept for, at least.
        over: the level of a hierarchy whose replicas average their loss: all that communicate.

    `average` takes `value`, the loss of this replica, a 0-d array: of one batch, or smoothed.

    Returns:
        A policy for `periodic(every=...)`.

    Raises:
        ValueError: `initial` or `block` is below 1.
        TypeError: one of them is not an integer; `average` is called without `value` or
            `replicas`.

    Wang & Joshi 2019 (https://arxiv.org/abs/1810.08313), section 4.2, with blocks of steps in
    the place of blocks of time.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.local_sgd(mt.sgd(0.1), every=mt.adacomm(8, block=8))
        >>> params = torch.zeros(1)
        >>> state = tx.init(params)
        >>> for step in range(16):
        ...     loss = torch.tensor(4.0 if step < 8 else 1.0)
        ...     params, state = tx.average(params, state, value=loss, replicas=mt.Solo())
        >>> mt.find(state, mt.AdaCommState).period
        tensor(4, dtype=torch.int32)
    """
    initial, block = check_integer("initial", initial, 1), check_integer("block", block, 1)

    def init(params: Tree) -> tuple[Array, AdaCommState]:
        zero = counter(params)
        unknown = arrays.zeros("float32", like=zero) + float("inf")
        return initial, AdaCommState(zero + initial, zero + block, unknown)

    def period(
        step: Array,
        state: AdaCommState,
        *,
        value: Array | None = None,
        replicas: Levels | None = None,
    ) -> tuple[Array, AdaCommState]:
        if value is None:
            raise TypeError("adacomm follows the loss: pass value=..., a 0-d array, to `average`")
        world = resolve(replicas, over, "adacomm")

        def choose(state: AdaCommState) -> AdaCommState:
            loss = _beside(world.mean(_precise(value)), state.first)
            known = arrays.all_finite(state.first)
            falling = -arrays.floor(-initial * arrays.sqrt(loss / state.first))
            halved = (state.period + 1) // 2
            chosen = arrays.where(falling < state.period, arrays.maximum(falling, 1), halved)
            usable = arrays.all_finite(loss)
            return AdaCommState(
                arrays.astype(
                    arrays.where(usable & known, chosen, state.period), state.period.dtype
                ),
                arrays.where(known, step + block, state.until),
                arrays.where(usable & ~known, loss, state.first),
            )

        due = (step >= state.until) | ~arrays.all_finite(state.first)
        state = cond(due, choose, lambda state: state, state)
        return state.period, state

    return Policy(init, period)


def _precise(value: Array) -> Array:
    """The loss in float32, without its derivative."""
    if isinstance(value, torch.Tensor):
        return value.detach().float()
    return arrays.astype(value, arrays.namespace(value).float32)


def _beside(value: Array, like: Array) -> Array:
    return value.to(like.device) if isinstance(value, torch.Tensor) else value
