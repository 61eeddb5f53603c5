"""Every transform passes the battery, and the battery finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import meantime as mt
from meantime import tree
from meantime.testing import LawViolation, check_averager, check_transform
from tests.zoo import AVERAGERS, LEVELLED, PLAIN, ZOO

EXAMPLES = 12


@pytest.mark.parametrize("name", ZOO)
def test_transform(name: str) -> None:
    replicas = {"node": mt.Solo(), "world": mt.Solo()} if name in LEVELLED else mt.Solo()
    check_transform(ZOO[name](), replicas=replicas, examples=EXAMPLES)


@pytest.mark.parametrize("name", sorted(AVERAGERS))
def test_averager(name: str) -> None:
    levels = {"node": 2, "world": 4} if name in LEVELLED else None
    check_averager(ZOO[name](), plain=name in PLAIN, levels=levels, examples=EXAMPLES)


def test_given_parameters() -> None:
    params = {"w": torch.tensor([[1.0, 2.0]]), "b": None}
    check_transform(mt.adamw(1e-2), params=params, examples=3)
    check_averager(mt.diloco(mt.sgd(0.1), every=4), params=params, examples=3)


def test_extra_arguments_reach_those_that_name_them() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: float) -> Any:
        return tree.map(lambda u: u * value, updates), state

    tx = mt.chain(stateless(update), mt.periodic(mt.average_params(), every=2))
    extra = {"value": 0.5, "weight": 2.0}
    check_transform(tx, extra=extra, examples=3)
    with pytest.raises(LawViolation, match="value"):
        check_transform(tx, examples=3)


def test_skip() -> None:
    check_transform(cuts_the_derivative(), examples=3, skip=["differentiates", "runs_on_jax"])
    with pytest.raises(ValueError, match="diferentiates"):
        check_transform(mt.identity(), skip=["diferentiates"])


# Transforms that break one law each.


class Count(NamedTuple):
    count: torch.Tensor


def stateless(update: Callable[..., Any]) -> mt.Transform:
    return mt.Transform(lambda params: mt.EmptyState(), update)


def counting(update: Callable[..., Any], average: Callable[..., Any] | None = None) -> Any:
    functions = [update] if average is None else [update, average]
    return mt.Transform(lambda params: Count(torch.zeros((), dtype=torch.int32)), *functions)


def writes_to_updates() -> mt.Transform:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tree.map(lambda u: u.mul_(-1.0), updates), state

    return stateless(update)


def writes_to_state() -> mt.Transform:
    def update(updates: Any, state: Count, params: Any = None) -> Any:
        state.count.add_(1)
        return updates, state

    return counting(update)


def writes_to_params() -> mt.Transform:
    def average(params: Any, state: Any) -> Any:
        return tree.map(lambda p: p.mul_(0.5), params), state

    return mt.Transform(lambda params: mt.EmptyState(), average=average)


def hides_a_counter() -> mt.Transform:
    calls: list[int] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        calls.append(0)
        return tree.map(lambda u: u + len(calls), updates), state

    return stateless(update)


def changes_a_dtype_of_state() -> mt.Transform:
    return counting(lambda u, state, params=None: (u, Count(state.count + 1.0)))


def changes_the_structure_of_state() -> mt.Transform:
    return counting(lambda u, state, params=None: (u, (*state, torch.zeros(()))))


def counts_in_a_number() -> mt.Transform:
    return mt.Transform(lambda params: 0, lambda u, state, params=None: (u, state + 1))


def drops_none() -> mt.Transform:
    def without_none(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node
        if isinstance(node, dict):
            return type(node)((k, without_none(v)) for k, v in node.items() if v is not None)
        children = [without_none(v) for v in node if v is not None]
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)

    return stateless(lambda u, state, params=None: (without_none(u), state))


def promotes_updates() -> mt.Transform:
    return stateless(lambda u, state, params=None: (tree.map(torch.Tensor.double, u), state))


def needs_contiguous_leaves() -> mt.Transform:
    return stateless(lambda u, s, params=None: (tree.map(lambda x: x.view(-1).view_as(x), u), s))


def looks_at_strides() -> mt.Transform:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tree.map(lambda x: x * (1.0 + x.is_contiguous()), updates), state

    return stateless(update)


def swallows_typos() -> mt.Transform:
    return stateless(lambda u, state, params=None, **extra: (u, state))


def keeps_the_parameters() -> mt.Transform:
    return mt.Transform(lambda params: (params,))


def donates_wrongly() -> mt.Transform:
    def update(u: Any, state: Any, params: Any = None, *, donate: bool = False) -> Any:
        return tree.map(lambda x: x + donate, u), state

    return stateless(update)


def has_ambiguous_paths() -> mt.Transform:
    return mt.Transform(lambda params: {"a": {"b": torch.zeros(())}, "a.b": torch.ones(())})


def counts_in_update() -> mt.Transform:
    def update(updates: Any, state: Count, params: Any = None) -> Any:
        return updates, Count(state.count + 1)

    def average(params: Any, state: Count, *, replicas: Any = None) -> Any:
        if replicas is None:
            raise TypeError("needs replicas")
        return (replicas.mean(params) if state.count % 2 == 0 else params), state

    return counting(update, average)


def silent_without_replicas() -> mt.Transform:
    def average(params: Any, state: Any, *, replicas: Any = None) -> Any:
        return (params if replicas is None else replicas.mean(params)), state

    return mt.Transform(lambda params: mt.EmptyState(), average=average)


def looks_at_numbers() -> mt.Transform:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tree.map(lambda u: u if u.sum() > 0 else 2 * u, updates), state

    return stateless(update)


def cuts_the_derivative() -> mt.Transform:
    return stateless(lambda u, s, params=None: (tree.map(lambda x: x.detach() * 1.0, u), s))


def calls_torch() -> mt.Transform:
    return stateless(lambda u, state, params=None: (tree.map(torch.tanh, u), state))


def compiles_at_every_step() -> mt.Transform:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, tree.map(lambda x: x.new_zeros(x.shape).t() if x.ndim == 2 else x, state)

    return mt.Transform(lambda params: tree.zeros_like(params), update)


BROKEN = {
    writes_to_updates: "pure",
    writes_to_state: "pure",
    writes_to_params: "pure",
    hides_a_counter: "pure",
    changes_a_dtype_of_state: "stable_state",
    changes_the_structure_of_state: "stable_state",
    counts_in_a_number: "stable_state",
    drops_none: "stable_updates",
    promotes_updates: "stable_updates",
    needs_contiguous_leaves: "stable_updates",
    looks_at_strides: "any_layout",
    swallows_typos: "keywords",
    keeps_the_parameters: "own_memory",
    donates_wrongly: "donation",
    has_ambiguous_paths: "checkpoint",
    counts_in_update: "counted_in_average",
    silent_without_replicas: "never_silent",
    looks_at_numbers: "vectorises",
    cuts_the_derivative: "differentiates",
    calls_torch: "runs_on_jax",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_broken_transform_is_found(make: Callable[[], mt.Transform]) -> None:
    with pytest.raises(LawViolation) as caught:
        check_transform(make(), examples=100)  # which are drawn: few may miss a fault
    assert caught.value.law == BROKEN[make], str(caught.value)
    assert "params" in str(caught.value)


def test_recompilation_is_found() -> None:
    params = {"w": torch.ones(2, 2)}
    with pytest.raises(LawViolation, match=r"'compiles'.*compiled anew"):
        check_transform(compiles_at_every_step(), params=params, examples=1)
