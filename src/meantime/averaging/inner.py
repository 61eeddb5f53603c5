"""What a synchronisation makes of the inner optimizer's state, which is kept otherwise.

These take the place of the inner optimizer. Inside of `periodic` they step on every local step and
act on the state whenever the replicas are synchronised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree

from meantime import arrays, tree
from meantime.averaging.around import update_of
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.transform import Transform, as_transform
from meantime.tree import Tree


class InnerState(NamedTuple):
    """The inner optimizer's state, and that of the averager of each field."""

    inner: Any
    averagers: dict[str, Any]


@made
def restart(inner: Any) -> Transform:
    r"""An optimizer whose state is made anew at every call of `average`.

    .. math:: s_k \leftarrow \mathrm{init}(\theta_k)

    `periodic(chain(average_params(), restart(inner)), every=8)` begins every round with a new
    inner optimizer, as the clients of `fedavg` do: no momentum is left of the round before, and
    schedules of the learning rate begin again. With
    `outer(chain(mean(), slow_momentum(learning_rate)))` in the place of `average_params()` it is
    SlowMo that resets the buffers.

    Args:
        inner: the optimizer of the local steps. (`AveragingOptimizer` has `optimizer_state` for
            those of `torch.optim`.)

    Raises:
        TypeError: `inner` averages, which is not to begin anew.

    McMahan et al. 2017 (https://arxiv.org/abs/1602.05629), algorithm 1; Wang et al. 2020
    (https://arxiv.org/abs/1910.00643), algorithm 1, "reset".

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.periodic(mt.restart(mt.sgd(1.0, momentum=0.5)), every=2)
        >>> params, state = torch.zeros(1), tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     params, state = mt.step(tx, torch.ones(1), params, state)
        ...     print(params)
        tensor([-1.])
        tensor([-2.5000])
        tensor([-3.5000])
    """
    part = as_transform(inner)
    if part.averages:
        raise TypeError(
            f"restart(...) takes the optimizer of the local steps, but {inner!r} averages: put "
            "what averages beside it, chain(averager, restart(optimizer))"
        )

    def average(params: Tree, state: Any) -> tuple[Tree, Any]:
        return params, part.init(params)

    return Transform(part.init, part.update if part.updates else None, average)


@made
def average_state(inner: Any, averagers: Mapping[str, Any]) -> Transform:
    r"""An optimizer of which parts of the state are averaged.

    .. math:: m_k \leftarrow \tfrac1K \textstyle\sum_j m_j \quad\text{for the fields } m
        \text{ that are named}

    Args:
        inner: the optimizer of the local steps.
        averagers: an averager for each field of its named tuples, `{"nu": average_params()}` say,
            which acts on the list of all fields of that name. Adam has the moments "mu" and "nu",
            SGD has "trace". Numbers of steps are not averaged: every replica has its own.

    An averager may have a period: `{"mu": periodic(average_params(), 30)}` in a chain. Inside of
    `periodic`, `average_params()` is called at every synchronisation. Means of second moments are
    not negative.

    Raises:
        ValueError: `init` finds no field of that name.
        TypeError: `init` finds integers in it.

    Local Adam and DES-LOC average both moments, see `desloc`; Wang et al. 2020
    (https://arxiv.org/abs/1910.00643), algorithm 1, "average", for momentum.

    Example:
        >>> import torch, meantime as mt
        >>> inner = mt.average_state(mt.trace(0.5), {"trace": mt.average_params()})
        >>> tx, world = mt.chain(inner, mt.scale(-1.0), mt.average_params()), mt.Vmapped(2)
        >>> def one_step(grads):
        ...     state = mt.step(tx, grads, 0 * grads, tx.init(grads), replicas=world)[1]
        ...     return mt.find(state, mt.TraceState).trace
        >>> torch.func.vmap(one_step)(torch.tensor([1.0, 3.0]))
        tensor([2., 2.])
    """
    part = as_transform(inner)
    members = {name: as_transform(averager) for name, averager in averagers.items()}

    def init(params: Tree) -> InnerState:
        state = part.init(params)
        for name in members:
            _check_field(state, name)
        return InnerState(state, {k: m.init(_fields(state, k)) for k, m in members.items()})

    @forwards(part.average, *(member.average for member in members.values()))
    def average(params: Tree, state: InnerState, **extra: Any) -> tuple[Tree, InnerState]:
        params, inner_state = part.average(params, state.inner, **pick(part.average, extra))
        states = {}
        for name, member in members.items():
            fields, states[name] = member.average(
                _fields(inner_state, name), state.averagers[name], **pick(member.average, extra)
            )
            inner_state = _with_fields(inner_state, name, fields)
        return params, InnerState(inner_state, states)

    return Transform(init, update_of(part, "inner"), average)


def _apart(state: Any, name: str) -> tuple[list[Any], list[int], Any]:
    """The nodes of a state, where among them the named tuples are that have the field, and the
    structure above."""

    def has_field(node: Any) -> bool:
        return name in getattr(node, "_fields", ())

    nodes, spec = optree.tree_flatten(state, is_leaf=has_field)
    return nodes, [i for i, node in enumerate(nodes) if has_field(node)], spec


def _fields(state: Any, name: str) -> list[Tree]:
    nodes, places, _ = _apart(state, name)
    return [getattr(nodes[i], name) for i in places]


def _with_fields(state: Any, name: str, fields: list[Tree]) -> Any:
    nodes, places, spec = _apart(state, name)
    for i, field in zip(places, fields, strict=True):
        nodes[i] = nodes[i]._replace(**{name: field})
    return spec.unflatten(nodes)


def _check_field(state: Any, name: str) -> None:
    """Raise unless there is such a field and it has a mean."""
    fields = _fields(state, name)
    if not fields:
        raise ValueError(
            f"average_state: the inner optimizer's state has no field {name!r}; it has "
            f"{_names(state) or 'none'}"
        )
    for leaf in tree.leaves(fields):
        if not arrays.is_inexact(leaf):
            raise TypeError(
                f"average_state averages floating point fields, but {name!r} holds {leaf.dtype}: "
                "leave it out"
            )


def _names(state: Any) -> list[str]:
    """Of the fields of all named tuples."""
    names: set[str] = set()

    def note(node: Any) -> bool:
        names.update(getattr(node, "_fields", ()))
        return False

    optree.tree_leaves(state, is_leaf=note)
    return sorted(names)
