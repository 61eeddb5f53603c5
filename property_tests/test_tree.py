"""Laws of leafwise arithmetic: all leaves at once is leaf by leaf, and both are NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import meantime as mt
from meantime import arrays, tree
from meantime.testing.compare import close, same_bits, same_form
from meantime.testing.strategies import Pair, trees, trees_like

EXACT = (torch.float32, torch.float64)
numbers = st.floats(-10, 10, width=32)


@st.composite
def several(draw: st.DrawFn, count: int, **options: Any) -> list[Any]:
    """Some trees of one form."""
    first = draw(trees(**options))
    return [first, *(draw(trees_like(first)) for _ in range(count - 1))]


def scalars() -> st.SearchStrategy[Any]:
    """What stands for a hyperparameter: a number or a 0-d tensor."""
    return numbers | numbers.map(torch.tensor) | numbers.map(lambda x: torch.tensor(x).double())


# Formulas that between them use every operation of `meantime.arrays`.


def polynomial(x, y, a, b):
    return a * x + y * b - x * y + (b - x) - (-y) + x**2


def quotient(x, y, a, b):
    return x / (arrays.abs(y) + 1.0) + a / (arrays.sqrt(arrays.abs(x)) + 1.0) + x / 3.0


def selection(x, y, a, b):
    clamped = arrays.minimum(arrays.maximum(x, -1.0), y)
    return arrays.where(x > y, clamped, arrays.where(y <= a, x, arrays.sign(y) * b))


def transcendental(x, y, a, b):
    return arrays.exp(-arrays.abs(x)) + arrays.cos(y) + arrays.expm1(-(y * y)) + arrays.floor(x)


def logarithm(x, y, a, b):
    return arrays.log(arrays.abs(x) + 1.0) * (x < y) + (x >= y) * b


FORMULAS = [polynomial, quotient, selection, transcendental, logarithm]


@pytest.mark.parametrize("formula", FORMULAS)
@given(pair=several(2), a=scalars(), b=scalars())
def test_leafwise_is_leaf_by_leaf(formula, pair, a, b) -> None:
    found = tree.leafwise(formula)(*pair, a, b)
    wanted = tree.map(lambda x, y: arrays.astype(formula(x, y, a, b), x.dtype), *pair)
    same_bits("", found, wanted, "all at once differs from one by one")


@pytest.mark.parametrize("formula", FORMULAS)
@given(pair=several(2, dtypes=EXACT), a=numbers, b=numbers)
def test_leafwise_is_numpy(formula, pair, a, b) -> None:
    def in_numpy(x, y):
        # In double precision: what a float32 result rounds.
        return torch.from_numpy(np.array(formula(x.double().numpy(), y.double().numpy(), a, b)))

    found = tree.leafwise(formula)(*pair, a, b)
    wanted = tree.map(lambda x, y: in_numpy(x, y).to(x.dtype), *pair)
    scale = tree.map(lambda x, y: 1000.0 + x.double() ** 2 + y.double() ** 2, *pair)
    if formula in (selection, transcendental, logarithm):
        # Their jumps (floor, <) fall the same way, as no rounding comes before them.
        scale = tree.map(lambda x, y: 100.0 + abs(x.double()) + abs(y.double()), *pair)
    close("", found, wanted, "differs from NumPy", scale=scale)


@given(several(3), scalars(), scalars())
def test_several_results_take_the_dtypes_of_like(triple, a, b) -> None:
    @tree.leafwise(like=("mu", "nu"))
    def moments(g, mu, nu, a, b):
        return a * mu + b * g, a * nu + b * g * g

    g, mu, nu = triple
    nu = tree.cast(nu, torch.float64)
    found = moments(g, mu, nu, a, b)
    same_form("mu", found[0], mu)
    same_form("nu", found[1], nu)
    wanted = tree.map(lambda x, y: arrays.astype(a * y + b * x, y.dtype), g, mu)
    same_bits("mu", found[0], wanted, "the first of two results differs")


@given(several(2))
def test_map_keeps_the_structure(pair) -> None:
    calls = []

    def note(x, y):
        calls.append((x, y))
        return len(calls)

    found = tree.map(note, *pair)
    columns = [optree.tree_leaves(values) for values in pair]
    assert all(x is a and y is b for (x, y), a, b in zip(calls, *columns, strict=True))
    assert optree.tree_structure(found) == optree.tree_structure(pair[0])
    assert optree.tree_leaves(found) == list(range(1, len(calls) + 1))


@given(trees(), st.data())
def test_mismatch_names_the_path(values, data) -> None:
    paths, (leaves, spec) = tree.paths(values), optree.tree_flatten(values)
    i = data.draw(st.integers(0, len(leaves) - 1))
    other = spec.unflatten([{"deeper": x} if j == i else x for j, x in enumerate(leaves)])
    assume(paths[i])  # a bare leaf has no path
    for function in (mt.apply_updates, lambda a, b: tree.map(torch.add, a, b), tree.cast_like):
        with pytest.raises(ValueError, match="structure") as caught:
            function(values, other)
        last = optree.tree_accessors(values)[i][-1].entry
        assert paths[i] in str(caught.value) or repr(last) in str(caught.value)


@given(several(2))
def test_vdot_and_global_norm(pair) -> None:
    flat = [
        np.concatenate([x.double().numpy().reshape(-1) for x in tree.leaves(values)])
        for values in pair
    ]
    size = float(np.abs(flat[0]) @ np.abs(flat[1])) + 1e-30
    assert abs(float(tree.vdot(*pair)) - flat[0] @ flat[1]) <= 1e-5 * size
    norm = np.linalg.norm(flat[0])
    found = tree.global_norm(pair[0])
    assert abs(float(found) - norm) <= 1e-5 * norm + 1e-18  # smaller squares underflow
    assert found.ndim == 0
    assert found.dtype in EXACT


@given(trees(), st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_cast(values, dtype) -> None:
    found = tree.cast({"floats": values, "kept": torch.arange(3)}, dtype)
    same_bits("", found["floats"], tree.map(lambda x: x.to(dtype), values), "cast differs")
    assert found["kept"].dtype == torch.int64


@given(trees())
def test_cast_like_undoes_widening(values) -> None:
    same_bits("", tree.cast_like(tree.cast(values, torch.float64), values), values, "not undone")


@given(trees(), st.booleans())
def test_zeros_like_and_copy(values, wide) -> None:
    dtypes = [
        torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
        for x in tree.leaves(values)
    ]
    for made, wanted in (
        (tree.zeros_like(values, wide=wide), tree.map(torch.zeros_like, values)),
        (tree.copy(values, wide=wide), values),
    ):
        leaves = tree.leaves(made)
        assert [x.dtype for x in leaves] == dtypes
        same_bits("", tree.cast_like(made, values), wanted, "other values")
        for x, original in zip(leaves, tree.leaves(values), strict=True):
            x += 1.0  # its own memory
            assert x.numel() == 0 or x.data_ptr() != original.data_ptr()


@given(trees(), st.data())
def test_all_finite(values, data) -> None:
    assert tree.all_finite(values)
    leaves, spec = optree.tree_flatten(values)
    i = data.draw(st.integers(0, len(leaves) - 1))
    assume(leaves[i].numel())
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    leaves[i] = leaves[i].clone()
    leaves[i][(0,) * leaves[i].ndim] = bad
    assert not tree.all_finite(spec.unflatten(leaves))


@given(trees())
def test_paths_lead_to_their_leaves(values) -> None:
    for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True):
        assert eval("root" + path, {"root": values, "Pair": Pair}) is leaf
