"""Hypothesis strategies: trees of tensors, replicas of them, and schedules of synchronisation.

All data is drawn, never generated from a hidden seed, so that hypothesis can shrink it: a
failing test reports the smallest tree with the simplest numbers that still fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from meantime.tree import Tree, map

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of leaves that `trees` draws from by default."""

SHAPES = ((), (3,), (2, 3), (0,), (1,), (3, 2), (2, 0), (2, 1, 2))


class Pair(NamedTuple):
    """The kind of named tuple that drawn trees contain."""

    first: Any
    second: Any


class Timetable(NamedTuple):
    """Arguments of `meantime.periodic`, and a number of local steps to run it for."""

    every: int
    after: int
    first: int | None
    last: int | None
    steps: int


def tensors(
    shape: Sequence[int], dtype: torch.dtype, *, magnitude: float = 100.0
) -> st.SearchStrategy[Tensor]:
    """Tensors of finite numbers between `-magnitude` and `magnitude`, in any memory layout.

    Beside plain contiguous ones there are tensors that skip every other row of their storage,
    whose axes are swapped in memory, and which begin inside of a larger storage.

    Args:
        shape, dtype: of every tensor; the dtype is a floating one.
        magnitude: a bound that float16 can represent.

    Example:
        >>> import torch
        >>> from hypothesis import given
        >>> @given(tensors((2, 3), torch.float32))
        ... def test(x):
        ...     assert x.shape == (2, 3) and x.isfinite().all()
        >>> test()
    """
    wide = dtype == torch.float64
    elements = st.floats(-magnitude, magnitude, width=64 if wide else 32, allow_subnormal=False)
    values = hnp.arrays(np.float64 if wide else np.float32, tuple(shape), elements=elements)
    # `torch.tensor` copies: the arrays of hypothesis may be shared between examples.
    return st.builds(
        lambda x, layout: _laid_out(torch.tensor(x).to(dtype), layout),
        values,
        st.sampled_from(("contiguous", "strided", "transposed", "offset")),
    )


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "strided" and x.ndim:
        return x.repeat_interleave(2, 0)[::2]
    if layout == "transposed":
        return x.mT.contiguous().mT if x.ndim > 1 else x
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return x


@st.composite
def trees(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    magnitude: float = 100.0,
    max_leaves: int = 4,
    leading: tuple[int, ...] = (),
) -> Tree:
    """Nested dicts, lists, tuples and named tuples of floating tensors, at least one of them.

    There are `None` leaves, 0-d and empty tensors, non-contiguous ones and mixed dtypes among
    them, and bare tensors without any container.

    Args:
        dtypes: what leaves are made of, `(torch.float32, torch.float64)` for exact laws.
        magnitude: bound of all numbers.
        max_leaves: how many tensors and `None`s at most.
        leading: axes put before the shape of every leaf.

    Example:
        >>> import torch, meantime as mt
        >>> from hypothesis import given
        >>> @given(trees(dtypes=[torch.float32]))
        ... def test(tree):
        ...     assert all(x.dtype == torch.float32 for x in mt.tree.leaves(tree))
        >>> test()
    """
    leaf = st.tuples(st.sampled_from(SHAPES), st.sampled_from(tuple(dtypes)))
    # Descriptions first, values afterwards: `recursive` draws many trees that it throws away.
    described: Any = draw(
        st.recursive(leaf.map(_Leaf) | st.none(), _containers, max_leaves=max_leaves)
    )
    if not optree.tree_leaves(described):
        described = Pair(draw(leaf.map(_Leaf)), described)

    def tensor(leaf: _Leaf) -> Tensor:
        return draw(tensors((*leading, *leaf.shape), leaf.dtype, magnitude=magnitude))

    return map(tensor, described)


class _Leaf:
    """A leaf to optree, unlike the tuple it is made of."""

    def __init__(self, description: tuple[tuple[int, ...], torch.dtype]):
        self.shape, self.dtype = description


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
    listed = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        keyed, listed, keyed.map(OrderedDict), listed.map(tuple), st.builds(Pair, inner, inner)
    )


@st.composite
def trees_like(
    draw: st.DrawFn, tree: Tree, *, magnitude: float = 100.0, leading: tuple[int, ...] = ()
) -> Tree:
    """Trees of the structure, shapes and dtypes of `tree`: gradients for parameters, say.

    Args:
        tree: the example.
        magnitude: bound of all numbers.
        leading: axes put before the shape of every leaf; `(size,)` for one tree a replica.

    Example:
        >>> import meantime as mt
        >>> from hypothesis import given, strategies as st
        >>> @given(trees().flatmap(lambda params: st.tuples(st.just(params), trees_like(params))))
        ... def test(pair):
        ...     params, grads = pair
        ...     mt.apply_updates(params, grads)
        >>> test()
    """

    def one(x: Tensor) -> Tensor:
        return draw(tensors((*leading, *x.shape), x.dtype, magnitude=magnitude))

    return map(one, tree)


def replica_counts(max_size: int = 5) -> st.SearchStrategy[int]:
    """How many replicas there are, from 1.

    Example:
        >>> from hypothesis import given
        >>> @given(replica_counts(3))
        ... def test(size):
        ...     assert 1 <= size <= 3
        >>> test()
    """
    return st.integers(1, max_size)


def stacked_trees(
    size: int, *, dtypes: Sequence[torch.dtype] = FLOATS, magnitude: float = 100.0
) -> st.SearchStrategy[Tree]:
    """One tree a replica, stacked: every leaf has a leading axis of length `size`.

    What `torch.func.vmap` takes for a world of `meantime.Vmapped(size)`; see `trees`.

    Example:
        >>> import meantime as mt
        >>> from hypothesis import given
        >>> @given(stacked_trees(3))
        ... def test(tree):
        ...     assert all(len(x) == 3 for x in mt.tree.leaves(tree))
        >>> test()
    """
    return trees(dtypes=dtypes, magnitude=magnitude, leading=(size,))


@st.composite
def timetables(draw: st.DrawFn, *, max_steps: int = 16) -> Timetable:
    """When to synchronise: `every`, `after`, `first` and `last`, and for how many `steps`.

    Periods, warm-ups and ends beyond the number of steps are among them.

    Example:
        >>> import meantime as mt
        >>> from hypothesis import given
        >>> @given(timetables())
        ... def test(table):
        ...     *arguments, steps = table
        ...     mt.periodic(mt.average_params(), *arguments)
        >>> test()
    """
    bound = max_steps + 2
    return Timetable(
        every=draw(st.integers(1, bound)),
        after=draw(st.integers(0, bound)),
        first=draw(st.none() | st.integers(1, bound)),
        last=draw(st.none() | st.integers(1, bound)),
        steps=draw(st.integers(1, max_steps)),
    )
