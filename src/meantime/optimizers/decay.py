"""Weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meantime import tree
from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.made import made
from meantime.schedules import Hyperparameter, check, value_at
from meantime.transform import Transform
from meantime.tree import Tree, leafwise


class DecayState(NamedTuple):
    """How many updates were made; 0-d int32."""

    count: Array


@leafwise
def _decayed(updates: Array, params: Array, weight_decay: Array) -> Array:
    return updates + weight_decay * params


@made
def add_decayed_weights(
    weight_decay: Hyperparameter, mask: Tree | Callable[[Tree], Tree] | None = None
) -> Transform:
    r"""Add a multiple of the parameters: :math:`u \leftarrow u + \lambda \theta`.

    Before the inner rule it is L2 regularisation (coupled), after it decoupled weight decay
    (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101).

    Args:
        weight_decay: :math:`\lambda`, a number or a schedule of the number of updates.
        mask: a tree of bools with the structure of the parameters, or a function of the
            parameters that returns one; leaves marked False are not decayed.

    Raises:
        ValueError: `weight_decay` is negative; `update` is called without `params`.

    Example:
        >>> import torch
        >>> params = {"weight": torch.ones(1), "bias": torch.ones(1)}
        >>> tx = add_decayed_weights(0.1, mask={"weight": True, "bias": False})
        >>> zeros = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
        >>> tx.update(zeros, tx.init(params), params)[0]
        {'weight': tensor([0.1000]), 'bias': tensor([0.])}
    """
    check("weight_decay", weight_decay, 0)

    def init(params: Tree) -> DecayState:
        return DecayState(counter(params, local=True))

    def update(updates: Tree, state: DecayState, params: Tree = None) -> tuple[Tree, DecayState]:
        if params is None:
            raise ValueError(
                "add_decayed_weights needs the parameters: call update(grads, state, params)"
            )
        decayed = _decayed(updates, params, value_at(weight_decay, state.count))
        if mask is not None:
            chosen = mask(params) if callable(mask) else mask
            decayed = tree.map(lambda old, new, yes: new if yes else old, updates, decayed, chosen)
        return decayed, DecayState(increment(state.count))

    return Transform(init, update)
