"""Replicas on springs to a common center."""

from __future__ import annotations

from typing import NamedTuple

from meantime.arrays import Array
from meantime.averaging.anchors import anchor_of, descended, restarted
from meantime.averaging.parameters import MeanState, mean
from meantime.control import as_flag, select
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.schedules import check
from meantime.state import keeps_apart
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, leafwise, leaves


@keeps_apart()
class ElasticState(NamedTuple):
    """The center (at least float32, the same on all replicas), and the state of the mean."""

    center: Tree
    mean: MeanState


@leafwise(like="center")
def _stretch(params: Array, center: Array) -> Array:
    return params - center


@made
def elastic(pull: float = 0.9, over: str | None = None) -> Transform:
    r"""Let every replica and a common center attract each other, at every call of `average`.

    .. math::
        e_k = \rho\,(\theta_k - \Theta), \qquad
        \theta_k \leftarrow \theta_k - e_k, \qquad
        \Theta \leftarrow \Theta + \sum_k e_k, \qquad \rho = \beta / K

    Replicas explore on their own, and the center is the model:
    `find(state, ElasticState).center`. The sum of all replicas and the center stays what it is.

    Args:
        pull: :math:`\beta`, how far the center moves towards the mean of the replicas, in [0, 1].
        over: the level of a hierarchy, where `replicas` is a mapping.

    `average(..., now=True)` does what exchanging for ever would lead to: the center and all
    replicas become :math:`(\Theta + \sum_k \theta_k) / (K + 1)`. Pass it at the end of training.

    `chain(sgd(0.1), periodic(elastic(), every=10))` is EASGD, and with
    `sgd(0.01, momentum=0.99, nesterov=True)` EAMSGD. A replica whose parameters are not all finite
    takes no part, and restarts from the center.

    Raises:
        ValueError: `pull` is outside of [0, 1].
        TypeError: a leaf of the parameters is an integer or a bool; `average` is called without
            `replicas`, or they have no level `over`.

    Zhang, Choromanska & LeCun 2015 (https://arxiv.org/abs/1412.6651), equations 5 and 6 and
    section 5: :math:`\beta` = 0.9.

    Example:
        >>> import torch, meantime as mt
        >>> tx, world = mt.elastic(pull=0.5), mt.Vmapped(2)
        >>> def one_call(params):
        ...     params, state = tx.average(params, tx.init(0 * params), replicas=world)
        ...     return params, state.center
        >>> torch.func.vmap(one_call)(torch.tensor([4.0, 8.0]))
        (tensor([3., 6.]), tensor([3., 3.]))
    """
    check("pull", pull, 0, 1)
    everyone = mean(over)

    def init(params: Tree) -> ElasticState:
        return ElasticState(anchor_of(params, "elastic"), everyone.init(params))

    def average(
        params: Tree,
        state: ElasticState,
        *,
        replicas: Levels | None = None,
        now: bool | Array = False,
    ) -> tuple[Tree, ElasticState]:
        size = resolve(replicas, over, "elastic").size
        if not leaves(params):
            return params, state
        stretch = _stretch(params, state.center)
        average, counted = everyone.update(stretch, state.mean, replicas=replicas)
        at_rest = as_flag(now)
        center = select(
            at_rest,
            lambda: descended(state.center, average, -size / (size + 1)),
            lambda: descended(state.center, average, -pull),
        )
        params = select(
            all_finite(stretch) & (at_rest == 0),
            lambda: descended(params, stretch, pull / size),
            lambda: restarted(center, params),
        )
        return params, ElasticState(center, counted)

    return Transform(init, average=average)
