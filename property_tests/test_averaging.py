"""Laws of the mean over simulated replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing import check_averager
from meantime.testing.cases import vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, stacked_trees, trees

Replicated = tuple[int, Any]


def replicated(min_size: int = 1) -> st.SearchStrategy[Replicated]:
    """A number of replicas and a tree of each, stacked."""
    sizes = replica_counts().filter(lambda size: size >= min_size)
    return sizes.flatmap(lambda size: st.tuples(st.just(size), stacked_trees(size)))


def synchronised(
    tx: mt.Transform, size: int, params: Any, weight: Any = None, start: Any = None
) -> tuple[Any, Any]:
    """All replicas after one forced synchronisation."""

    def average(params: Any, weight: Any) -> Any:
        state = tx.init(params if start is None else start)
        extra = {} if weight is None else {"weight": weight}
        return tx.average(params, state, replicas=mt.Vmapped(size), now=True, **extra)

    return vmapped(average, params, weight)


def expected(x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    """The weighted mean in float64, of the replicas that have a weight."""
    present = weight > 0
    values = x.double().numpy()[present]
    mean = np.tensordot(weight[present] / weight.sum(), values, 1)
    return torch.from_numpy(np.array(mean)).expand(x.shape).to(x.dtype)


def weights(size: int) -> st.SearchStrategy[np.ndarray]:
    """Weights, some of them zero but not all."""
    one = st.sampled_from([0.0, 0.5, 1.0, 3.0, 1000.0])
    return st.lists(one, min_size=size, max_size=size).filter(any).map(np.array)


# The library's own battery states these laws; here for plain averaging, in more cases.
AVERAGERS = {
    "average_params": mt.average_params,
    "outer_sgd": lambda: mt.outer(mt.chain(mt.mean(), mt.sgd(1.0))),
    "periodic": lambda: mt.periodic(mt.average_params(), every=1000),
}


@pytest.mark.parametrize("name", AVERAGERS)
def test_laws_of_the_mean(name: str) -> None:
    check_averager(AVERAGERS[name](), plain=True, examples=60)


@given(replicated(), st.data())
def test_weighted_mean(replicated: Replicated, data: st.DataObject) -> None:
    size, params = replicated
    weight = data.draw(weights(size))
    found, _ = synchronised(mt.average_params(), size, params, torch.from_numpy(weight))
    wanted = tree.map(lambda x: expected(x, weight), params)
    close("params", found, wanted, "not sum(w x) / sum(w)", scale=params)
    for leaf in tree.leaves(found):
        for replica in leaf[1:]:
            same_bits("params", replica, leaf[0], "replicas differ")


@given(replicated(min_size=2), st.data())
def test_a_replica_of_weight_zero_only_receives(replicated: Replicated, data: Any) -> None:
    size, params = replicated
    rank = data.draw(st.integers(0, size - 1))
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), 1e4]))
    weight = torch.ones(size)
    weight[rank] = 0.0
    spoilt = tree.map(lambda x: _with(x, rank, bad), params)
    found, _ = synchronised(mt.average_params(), size, spoilt, weight)
    wanted, _ = synchronised(mt.average_params(), size, params, weight)
    same_bits("params", found, wanted, "a replica of weight 0 took part")


@pytest.mark.parametrize("outer", [False, True])
@given(replicated(min_size=2), st.data())
def test_a_replica_that_is_not_finite_is_rejected_and_counted(
    outer: bool, replicated: Replicated, data: Any
) -> None:
    size, params = replicated
    start = tree.map(lambda x: torch.zeros_like(x[0]), params)
    tx = mt.outer(mt.chain(mt.mean(), mt.sgd(1.0))) if outer else mt.average_params()
    rank = data.draw(st.integers(0, size - 1))
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    spoilt = tree.map(lambda x: _with(x, rank, bad), params)
    found, state = synchronised(tx, size, spoilt, start=start)
    weight = np.ones(size)
    weight[rank] = 0.0
    wanted = tree.map(lambda x: expected(_with(x, rank, 0.0), weight), params)
    close("params", found, wanted, "not the mean of the others", scale=params)
    has_numbers = any(x.numel() for x in tree.leaves(params))
    rejected = mt.find(state, mt.MeanState).rejected
    assert rejected.tolist() == [int(k == rank and has_numbers) for k in range(size)]


@given(replica_counts(), trees())
def test_without_any_finite_replica_parameters_stay(size: int, params: Any) -> None:
    spoilt = tree.map(lambda x: torch.full_like(x, float("nan")).expand(size, *x.shape), params)
    found, state = synchronised(mt.average_params(), size, spoilt)
    same_bits("params", found, tree.map(torch.Tensor.clone, spoilt), "something was made up")
    has_numbers = any(x.numel() for x in tree.leaves(params))
    assert state.rejected.tolist() == [int(has_numbers)] * size


def _with(x: torch.Tensor, rank: int, value: float) -> torch.Tensor:
    x = x.clone()
    x[rank] = value
    return x


@given(replica_counts(8), trees())
def test_equal_replicas(size: int, params: Any) -> None:
    everywhere = tree.map(lambda x: x.expand(size, *x.shape).clone(), params)
    found, _ = synchronised(mt.average_params(), size, everywhere)
    # Within the roundings of a sum of so many terms, in float32 at least: bfloat16 and float16 do
    # not even see them.
    close("params", found, everywhere, "equal replicas moved", roundings=max(1.0, size / 2))


def nesterov(*members: Any) -> mt.Transform:
    return mt.outer(mt.chain(*members, mt.sgd(0.7, momentum=0.9, nesterov=True)))


DELTA_METHODS = {
    "diloco": lambda: nesterov(mt.mean()),
    "adam": lambda: mt.outer(mt.chain(mt.mean(), mt.adam(0.1))),
    "slowmo": lambda: mt.outer(mt.chain(mt.mean(), mt.slow_momentum(0.1))),
    "eager": lambda: nesterov(mt.eager_mean()),
    "overlapped": mt.overlapped,
    "delayed": lambda: mt.delayed(
        mt.periodic(nesterov(mt.mean()), every=1), steps=1, merge="delta"
    ),
    "powersgd": lambda: nesterov(mt.codecs.powersgd(1)),
}


@pytest.mark.parametrize("name", DELTA_METHODS)
@given(replica_counts(8), trees(dtypes=[torch.float32, torch.bfloat16]))
def test_replicas_that_stayed_at_the_anchor(name: str, size: int, params: Any) -> None:
    """Differences from an anchor are exactly zero, and so is their mean."""
    params = tree.map(lambda x: x + 0.0, params)  # no -0
    everywhere = tree.map(lambda x: x.expand(size, *x.shape).clone(), params)
    found, _ = synchronised(DELTA_METHODS[name](), size, everywhere, start=params)
    same_bits("params", found, everywhere, "replicas that did not move were moved")


@given(replicated())
def test_integers_take_the_maximum(replicated: Replicated) -> None:
    size, params = replicated
    whole = tree.map(lambda x: x.nan_to_num().to(torch.int32), params)
    found, _ = synchronised(mt.average_params(), size, {"i": whole, "b": _signs(whole)})
    wanted = {"i": tree.map(_largest, whole), "b": tree.map(_largest, _signs(whole))}
    same_bits("params", found, wanted, "not the maximum")


def _signs(values: Any) -> Any:
    return tree.map(lambda x: x > 0, values)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(0, keepdim=True).expand(x.shape).clone()


@given(st.sampled_from([1, 2, 3, 6]), stacked_trees(6, dtypes=[torch.float32, torch.float64]))
def test_groups_are_worlds_of_their_own(group: int, params: Any) -> None:
    world = mt.Vmapped(6).groups(group)
    found = vmapped(lambda params: world.mean(params), params)
    for ranks in torch.arange(6).split(group):
        members = tree.map(lambda x, ranks=ranks: x[ranks], params)
        alone = vmapped(lambda values: mt.Vmapped(group).mean(values), members)
        here = tree.map(lambda x, ranks=ranks: x[ranks], found)
        same_bits("params", here, alone, "a group differs from a world of its size")
