"""Laws of replicas that meet a few others at a time, or a center."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing.cases import vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, stacked_trees, trees

Sends = list[list[bool]]

METHODS: dict[str, Callable[[], mt.Transform]] = {
    "ring": mt.gossip,
    "exponential": lambda: mt.gossip("exponential"),
    "push_sum": mt.push_sum,
    "elastic": mt.elastic,
    "noloco": mt.noloco,
}
methods = pytest.mark.parametrize("name", METHODS)


def start(tx: mt.Transform, params: Any) -> Any:
    return params, vmapped(tx.init, params)


def call(
    tx: mt.Transform,
    size: int,
    params: Any,
    state: Any,
    send: list[bool] | None = None,
    **extra: Any,
) -> Any:
    """All replicas after one call."""

    def average(params: Any, state: Any, send: Any) -> Any:
        sending = {} if send is None else {"send": send}
        return tx.average(params, state, replicas=mt.Vmapped(size), **extra, **sending)

    return vmapped(average, params, state, None if send is None else torch.tensor(send))


def stacked(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, Any]]:
    """A number of replicas, and a tree of doubles of each."""
    dtypes = [torch.float64]
    return sizes.flatmap(lambda size: st.tuples(st.just(size), stacked_trees(size, dtypes=dtypes)))


def everywhere(params: Any, size: int) -> Any:
    return tree.map(lambda x: x.expand(size, *x.shape).clone(), params)


def mean_of(params: Any) -> Any:
    return tree.map(lambda x: x.mean(0, keepdim=True).expand(x.shape), params)


def sendings(size: int, max_size: int = 8) -> st.SearchStrategy[Sends]:
    """Who sends, in some calls."""
    return st.lists(st.lists(st.booleans(), min_size=size, max_size=size), max_size=max_size)


def spread(params: Any) -> float:
    """The distance of all replicas from their mean."""
    return math.sqrt(sum(float((x - x.mean(0)).square().sum()) for x in tree.leaves(params)))


# --- what stays as it is -----------------------------------------------------------------------


@methods
@given(replica_counts(6), trees(), st.data())
def test_equal_replicas_that_do_not_move_stay_bit_for_bit(
    name: str, size: int, params: Any, data: st.DataObject
) -> None:
    tx = METHODS[name]()
    params = everywhere(tree.map(lambda x: x + 0.0, params), size)  # no -0
    found, state = start(tx, params)
    for send in data.draw(sendings(size, 4)):
        found, state = call(tx, size, found, state, send if name == "push_sum" else None)
        same_bits("params", found, params, "equal replicas were moved")


@pytest.mark.parametrize("name", ["ring", "exponential"])
@given(stacked(replica_counts(9)))
def test_gossip_preserves_the_mean(name: str, drawn: tuple[int, Any]) -> None:
    size, params = drawn
    tx = METHODS[name]()
    found, state = start(tx, params)
    for _ in range(4):
        found, state = call(tx, size, found, state)
    close("params", mean_of(found), mean_of(params), "the mean has moved", scale=params)


@given(replica_counts(6), trees(dtypes=[torch.float64]), st.integers(0, 2**31), st.data())
def test_push_sum_keeps_all_mass(size: int, params: Any, seed: int, data: st.DataObject) -> None:
    """Whoever sends, the weighted parameters are those of the start and all local steps."""
    tx, rng = mt.push_sum(), torch.Generator().manual_seed(seed)
    found, state = start(tx, everywhere(params, size))
    total = tree.map(torch.clone, found)
    for send in data.draw(sendings(size)):
        moves = tree.map(lambda x: torch.randn(x.shape, generator=rng, dtype=x.dtype), found)
        total = tree.map(torch.add, total, moves)
        found, state = call(tx, size, tree.map(torch.add, found, moves), state, send)
        assert (state.weight > 0).all()
        assert float(state.weight.sum()) == size  # sums of powers of two
        for x, wanted in zip(tree.leaves(found), tree.leaves(total), strict=True):
            held = torch.tensordot(state.weight, x, 1)
            bound = 1e-12 * (1 + float(wanted.abs().sum()))
            torch.testing.assert_close(held, wanted.sum(0), rtol=0, atol=bound)


@given(stacked(replica_counts(6)), st.floats(0, 1))
def test_elastic_keeps_the_sum_with_the_center(drawn: tuple[int, Any], pull: float) -> None:
    size, params = drawn
    tx = mt.elastic(pull)
    found, state = start(tx, params)
    at = tree.map(lambda x: x[:1].expand(x.shape), params)  # one center for all
    state = state._replace(center=at)
    found, state = call(tx, size, found, state)

    def total(x: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + center[0]

    before, after = tree.map(total, params, at), tree.map(total, found, state.center)
    close("params", after, before, "the sum has moved", scale=tree.map(lambda x: 4 * x, params))
    wanted = tree.map(lambda c, m: (1 - pull) * c + pull * m, at, mean_of(params))
    close("center", state.center, wanted, "not pulled to the mean", scale=params)


@given(replica_counts(5), trees(dtypes=[torch.float64]), st.integers(0, 2**31), st.integers(0, 9))
def test_the_mean_of_noloco_is_momentum_on_the_mean(
    size: int, params: Any, seed: int, pairs: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    pairwise = mt.noloco(0.7, 0.5, 0.9, seed=pairs)
    together = mt.outer(mt.chain(mt.mean(), mt.sgd(0.7, momentum=0.5)))
    found, wanted = (start(tx, everywhere(params, size)) for tx in (pairwise, together))
    for _ in range(5):
        moves = tree.map(lambda x: torch.randn(x.shape, generator=rng, dtype=x.dtype), found[0])
        found, wanted = (
            call(tx, size, tree.map(torch.add, params, moves), state)
            for tx, (params, state) in ((pairwise, found), (together, wanted))
        )
        scale = tree.map(lambda x: x.abs() + 10, found[0])
        close("params", mean_of(found[0]), wanted[0], "not the mean", scale=scale)


# --- where it leads to -------------------------------------------------------------------------


@given(stacked(st.integers(1, 9)))
def test_a_ring_contracts_by_its_second_eigenvalue(drawn: tuple[int, Any]) -> None:
    """At least; and exactly, where each replica differs from the next one as little as it can."""
    size, params = drawn
    rate = 0.0 if size < 3 else (1 + 2 * math.cos(2 * math.pi / size)) / 3
    tx = mt.gossip()
    found, _ = call(tx, size, *start(tx, params))
    rounding = 1e-13 * (1 + sum(float(x.abs().sum()) for x in tree.leaves(params)))
    assert spread(found) <= rate * spread(params) + rounding
    wave = torch.cos(2 * math.pi * torch.arange(size).double() / size)
    slowest = tree.map(lambda x: x[:1] + wave.reshape(-1, *[1] * (x.ndim - 1)), params)
    found, _ = call(tx, size, *start(tx, slowest))
    assert spread(found) == pytest.approx(rate * spread(slowest), abs=rounding)


@given(stacked(st.sampled_from([1, 2, 4, 8])))
def test_the_exponential_graph_is_exact_for_powers_of_two(drawn: tuple[int, Any]) -> None:
    size, params = drawn
    tx = mt.gossip("exponential")
    found, state = start(tx, params)
    for _ in range(size.bit_length() - 1):
        found, state = call(tx, size, found, state)
    close("params", found, mean_of(params), "not the mean of all", scale=params)


@settings(max_examples=12)
@given(stacked(replica_counts(6)), st.data())
def test_push_sum_leads_to_the_mean(drawn: tuple[int, Any], data: st.DataObject) -> None:
    """Whoever has sent before; from there in one call, if it is the last."""
    size, params = drawn
    tx = mt.push_sum()
    found, state = start(tx, params)
    for send in data.draw(sendings(size)):
        found, state = call(tx, size, found, state, send)
    last, after = call(tx, size, found, state, now=True)
    assert (after.weight == 1).all()
    for _ in range(90):
        found, state = call(tx, size, found, state)
    for x, y, wanted in zip(*map(tree.leaves, (found, last, mean_of(params))), strict=True):
        bound = 1e-12 * (1 + float(wanted.abs().max())) if wanted.numel() else 0.0
        torch.testing.assert_close(x, wanted, rtol=0, atol=bound)
        torch.testing.assert_close(y, wanted, rtol=0, atol=bound)


@given(stacked(replica_counts(6)))
def test_the_last_call_of_elastic_is_where_it_would_come_to_rest(drawn: tuple[int, Any]) -> None:
    size, params = drawn
    tx = mt.elastic()
    center = tree.map(lambda x: torch.ones_like(x), params)
    found, state = start(tx, params)
    last, state = call(tx, size, found, state._replace(center=center), now=True)
    wanted = tree.map(lambda x, c: (size * x + c) / (size + 1), mean_of(params), center)
    close("params", last, wanted, "another mean", scale=tree.map(lambda x: x.abs() + 1, params))
    again, after = call(tx, size, last, state)
    same_bits("params", again, last, "not at rest")
    same_bits("center", after.center, last, "not at rest")


@settings(max_examples=10)
@given(stacked(st.integers(2, 5)), st.integers(0, 9))
def test_noloco_pulls_replicas_together(drawn: tuple[int, Any], seed: int) -> None:
    size, params = drawn
    tx = mt.noloco(seed=seed)
    found, state = start(tx, params)
    for _ in range(40):
        found, state = call(tx, size, found, state)
    assert spread(found) <= 1e-2 * spread(params)
    close("params", mean_of(found), mean_of(params), "the mean has moved", scale=params)


# --- what is not finite ------------------------------------------------------------------------


@methods
@given(stacked(st.integers(2, 6)), st.data())
def test_a_replica_that_is_not_finite_recovers(
    name: str, drawn: tuple[int, Any], data: st.DataObject
) -> None:
    size, params = drawn
    rank = data.draw(st.integers(0, size - 1))
    bad = data.draw(st.sampled_from([float("nan"), float("inf")]))
    tx = METHODS[name]()
    good = tree.map(torch.zeros_like, params)
    _, state = start(tx, good)
    spoilt = tree.map(torch.clone, params)
    for x in tree.leaves(spoilt):
        x[rank] = bad
    found, state = call(tx, size, spoilt, state)
    for leaf in tree.leaves(found):
        assert leaf.isfinite().all()
    has_numbers = any(x.numel() for x in tree.leaves(params))
    rejected = mt.find(state, mt.MeanState).rejected
    assert rejected.tolist() == [int(k == rank and has_numbers) for k in range(size)]
    if name == "push_sum":
        assert float(state.weight.sum()) == size


@given(stacked(st.integers(3, 6)), st.data())
def test_neighbours_of_one_that_is_not_finite_keep_its_share(
    drawn: tuple[int, Any], data: st.DataObject
) -> None:
    size, params = drawn
    rank = data.draw(st.integers(0, size - 1))
    matrix = sum(torch.eye(size).double().roll(by, 0) for by in (-1, 0, 1)) / 3
    matrix += torch.diag(matrix[:, rank])
    matrix[rank] = (matrix[rank] > 0).double() / 2
    matrix[:, rank] = 0
    wanted = tree.map(lambda x: torch.tensordot(matrix, x, 1), params)
    spoilt = tree.map(torch.clone, params)
    for x in tree.leaves(spoilt):
        x[rank] = float("nan")
    tx = mt.gossip()
    found, _ = call(tx, size, *start(tx, spoilt))
    close("params", found, wanted, "another mean", scale=params)


@given(stacked(st.integers(1, 4)))
def test_integers_take_the_maximum_of_the_neighbours(drawn: tuple[int, Any]) -> None:
    size, params = drawn
    whole = tree.map(lambda x: x.to(torch.int32), params)
    signs = tree.map(lambda x: x > 0, whole)
    tx = mt.gossip()
    found, state = start(tx, (whole, signs))
    for _ in range(2):  # as far as two replicas are apart
        found, state = call(tx, size, found, state)
    largest = tree.map(lambda x: x.amax(0, keepdim=True).expand(x.shape).clone(), (whole, signs))
    same_bits("params", found, largest, "not the maximum")
