"""Outer optimizers: an ordinary update chain that steps on pseudo-gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from meantime.averaging.anchors import anchor_of, pseudo_gradient, restarted
from meantime.keywords import forwards
from meantime.made import made
from meantime.transform import Transform, as_transform, step
from meantime.tree import Tree


class OuterState(NamedTuple):
    """The parameters of the last synchronisation (at least float32) and the optimizer's state."""

    anchor: Tree
    optimizer: Any


@made
def outer(optimizer: Any) -> Transform:
    r"""Step an optimizer on what the replicas did since the last synchronisation.

    Keeps an anchor :math:`\Theta`, the parameters of the last synchronisation. At every call of
    `average` the pseudo-gradient :math:`\Delta_k = \Theta - \theta_k` is handed to the
    optimizer as if it were a gradient, the anchor makes the step, and the replica restarts
    from it:

    .. math::
        \Theta \leftarrow \Theta + \mathrm{update}(\Theta - \theta_k), \qquad
        \theta_k \leftarrow \Theta

    Args:
        optimizer: an update chain in which `mean()` communicates. What stands before `mean()`
            acts on this replica's pseudo-gradient, what stands after it on the mean. Its own
            `average` is called on the anchor.

    `outer(chain(mean(), sgd(1.0)))` is plain averaging; with Nesterov momentum it is DiLoCo.
    The anchor is at least float32, so small outer steps of bfloat16 parameters do not vanish.

    Raises:
        TypeError: a leaf of the parameters is an integer or a bool.

    Reddi et al. 2021 (https://arxiv.org/abs/2003.00295), algorithm 1; Douillard et al. 2023
    (https://arxiv.org/abs/2311.08105), algorithm 1.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.outer(mt.chain(mt.mean(), mt.sgd(0.5)))
        >>> state = tx.init(torch.tensor([1.0]))
        >>> params, state = tx.average(torch.tensor([0.0]), state, replicas=mt.Solo())
        >>> params
        tensor([0.5000])
    """
    inner = as_transform(optimizer)

    def init(params: Tree) -> OuterState:
        anchor = anchor_of(params, "outer")
        return OuterState(anchor, inner.init(anchor))

    @forwards(inner.update, inner.average)
    def average(params: Tree, state: OuterState, **extra: Any) -> tuple[Tree, OuterState]:
        delta = pseudo_gradient(state.anchor, params)
        # The anchor is still read after the optimizer's update.
        arguments = {k: v for k, v in extra.items() if k != "donate"}
        anchor, inner_state = step(inner, delta, state.anchor, state.optimizer, **arguments)
        return restarted(anchor, params), OuterState(anchor, inner_state)

    return Transform(init, average=average)
