"""Leafwise arithmetic on pytrees.

A tree is whatever optree flattens: nested dicts, lists, tuples, named tuples and registered
nodes, with `None` an empty subtree. Nodes of JAX's registry are nodes here too. A formula for one
leaf becomes a formula for trees by `leafwise`::

    @leafwise(like=("mu", "nu"))
    def moments(g, mu, nu, b1, b2):
        return b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g

    mu, nu = moments(grads, mu, nu, 0.9, 0.999)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from meantime import arrays
from meantime._foreach import Leaves, plain, suits, transforming
from meantime._jax_nodes import adopt
from meantime.arrays import Array

Tree = Any  # a pytree of arrays


def flatten(tree: Tree) -> tuple[list[Array], Any]:
    """The leaves, and the structure that puts them together again."""
    found, spec = optree.tree_flatten(tree)
    while not torch.compiler.is_compiling() and adopt(found):
        found, spec = optree.tree_flatten(tree)
    return found, spec


def leaves(tree: Tree) -> list[Array]:
    if torch.compiler.is_compiling():
        return optree.tree_leaves(tree)  # Dynamo flattens no dicts of constants
    return flatten(tree)[0]


def map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`function(leaf, *leaves_of_others)` on every leaf; all trees have the same structure."""
    if torch.compiler.is_compiling():
        # Dynamo cannot flatten a dict of constants (a mask). Here only `tree` is flattened.
        return optree.tree_map(function, tree, *others)
    first, spec = flatten(tree)
    columns = [_matching(spec, tree, other, function) for other in others]
    return spec.unflatten([function(*row) for row in zip(first, *columns, strict=True)])


def paths(tree: Tree) -> list[str]:
    """The path of every leaf, as one writes it: `['layers'][0].weight`."""
    return [accessor.codify("") for accessor in flatten(tree)[1].accessors()]


def parts(tree: Tree) -> list[list[str]]:
    """The names of the fields and keys, and the positions, on the way to every leaf."""
    return [
        [getattr(entry, "field", None) or str(entry.entry) for entry in accessor]
        for accessor in flatten(tree)[1].accessors()
    ]


def leafwise(
    function: Callable[..., Any] | None = None, *, like: str | tuple[str, ...] | None = None
) -> Callable[..., Any]:
    """Make a formula for one leaf a formula for whole trees.

    The first argument is a tree. Every other argument is either a tree of the same structure
    or a single value shared by all leaves (a number, a 0-d array). The formula uses operators
    and the functions of `meantime.arrays`; it must not look at shapes or at concrete values,
    so that it runs on torch tensors (one leaf or all leaves at a time, same numbers), under
    `torch.func` transforms and `torch.compile`, and on JAX and NumPy arrays.

    Args:
        like: the argument whose dtype the result takes; the first one by default. A tuple of
            names for a formula that returns a tuple. State keeps its dtype by this, whatever
            dtype a hyperparameter has.

    Returns:
        A function of trees that returns a tree (or a tuple of trees) of the same structure.

    Raises:
        ValueError: a tree has another structure than the first; the path is named.

    Example:
        >>> import torch
        >>> @leafwise
        ... def lerp(x, y, weight):
        ...     return x + weight * (y - x)
        >>> lerp({"a": torch.zeros(2), "b": torch.ones(1)},
        ...      {"a": torch.ones(2), "b": torch.ones(1)}, 0.25)
        {'a': tensor([0.2500, 0.2500]), 'b': tensor([1.])}
    """
    if function is None:
        return functools.partial(leafwise, like=like)
    formula = function
    names = list(inspect.signature(formula).parameters)
    single = not isinstance(like, tuple)
    models = [names.index(n) for n in (like if isinstance(like, tuple) else (like or names[0],))]

    @functools.wraps(formula)
    def mapped(tree: Tree, *others: Any) -> Any:
        first, spec = flatten(tree)
        whole = spec.is_leaf()
        arguments: list[Any] = [first]
        shared = [False]
        for other in others:
            share = not whole and optree.tree_is_leaf(other)
            shared.append(share)
            arguments.append(other if share else _matching(spec, tree, other, formula))
        columns = [a for a, share in zip(arguments, shared, strict=True) if not share]
        if _all_at_once(columns):
            operands = [
                a if share else Leaves(a) for a, share in zip(arguments, shared, strict=True)
            ]
            results = formula(*operands)
            lists = [r.tensors for r in ([results] if single else results)]
            rows: Iterable[Any] = zip(*lists, strict=True)
        else:
            repeated = [
                [a] * len(first) if share else a for a, share in zip(arguments, shared, strict=True)
            ]
            results = [formula(*row) for row in zip(*repeated, strict=True)]
            rows = ([r] for r in results) if single else iter(results)
        outputs: list[list[Array]] = [[] for _ in models]
        for i, row in enumerate(rows):
            for output, result, model in zip(outputs, row, models, strict=True):
                output.append(arrays.astype(result, arguments[model][i].dtype))
        trees = tuple(spec.unflatten(output) for output in outputs)
        return trees[0] if single else trees

    return mapped


def _all_at_once(columns: list[list[Any]]) -> bool:
    return _eager(columns) and suits(columns[0])


def _eager(columns: list[list[Any]]) -> bool:
    """Whether these are plain torch tensors on which operations run at once."""
    if not columns[0] or not all(plain(x) for column in columns for x in column):
        return False
    return not (torch.compiler.is_compiling() or transforming())


def _matching(spec: Any, tree: Tree, other: Tree, function: Callable[..., Any]) -> list[Any]:
    """The leaves of `other`, which must have the structure of `tree`."""
    found, structure = flatten(other)
    if structure == spec:
        return found
    # Kinds of mapping may differ (a dict of gradients for an OrderedDict of parameters).
    errors = optree.prefix_errors(tree, other)
    if not errors:
        found = spec.flatten_up_to(other)
        if all(optree.tree_is_leaf(x) for x in found):
            return found
        path = next(
            p for p, x in zip(paths(tree), found, strict=True) if not optree.tree_is_leaf(x)
        )
        reason = f"a leaf of the first is a subtree of the other at {path or 'the root'}"
    else:
        reason = str(errors[0](" tree"))
    name = getattr(function, "__name__", "map")
    raise ValueError(f"{name}: two trees differ in structure: {reason}")


def zeros_like(tree: Tree, *, wide: bool = False) -> Tree:
    """Zeros of the same shapes; `wide` makes them at least float32."""

    def zeros(x: Array) -> Array:
        dtype = arrays.wide_dtype(x) if wide else x.dtype
        return arrays.namespace(x).zeros_like(x, dtype=dtype)

    return map(zeros, tree)


def copy(tree: Tree, *, wide: bool = False) -> Tree:
    """The same values in memory of their own; `wide` makes them at least float32."""

    def copied(x: Array) -> Array:
        dtype = arrays.wide_dtype(x) if wide else x.dtype
        if isinstance(x, torch.Tensor):
            # What is trained in place is copied as it is now; other tensors keep their derivative.
            x = x.detach() if isinstance(x, torch.nn.Parameter) else x
            return x.clone() if x.dtype == dtype else x.to(dtype)
        return arrays.namespace(x).array(x, dtype=dtype, copy=True)

    return map(copied, tree)


def cast(tree: Tree, dtype: Any) -> Tree:
    """Every floating or complex leaf in `dtype`; integers and bools stay."""
    return map(lambda x: arrays.astype(x, dtype) if arrays.is_inexact(x) else x, tree)


@leafwise(like="like")
def cast_like(tree: Array, like: Array) -> Array:
    """Every leaf in the dtype of the leaf of `like`."""
    return tree


def vdot(a: Tree, b: Tree) -> Array:
    r"""Inner product :math:`\sum_i \bar a_i b_i` over all leaves, at least in float32; 0-d."""

    def one(x: Array, y: Array) -> Array:
        xp, dtype = arrays.namespace(x), arrays.wide_dtype(x)
        wide_x, wide_y = (arrays.astype(z, dtype) for z in (x, y))
        return (xp.conj(wide_x) * wide_y).sum()

    return _total(leaves(map(one, a, b)))


def global_norm(tree: Tree) -> Array:
    r"""Euclidean norm :math:`\sqrt{\sum_i |x_i|^2}` over all leaves, at least in float32; 0-d.

    Example:
        >>> import torch
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5.)
    """
    square = vdot(tree, tree)
    return arrays.sqrt(square.real if arrays.is_array(square) else float(square))


def all_finite(tree: Tree) -> Array:
    """Whether every floating element of a tree that has leaves is finite; a 0-d bool."""
    found = leaves(tree)
    finite = arrays.zeros("int32", like=found[0]) == 0
    inexact = [leaf for leaf in found if arrays.is_inexact(leaf)]
    if _eager([inexact]) and inexact[0].is_cpu and _finite_sum(inexact):
        return finite
    for leaf in inexact:
        if not arrays.is_dtensor(leaf):
            finite = arrays.all_finite(leaf) & finite
    shards = [leaf for leaf in inexact if arrays.is_dtensor(leaf)]
    if shards:  # one answer for all of them, so that it is the same on all their processes
        finite = (_total([(~torch.isfinite(x)).sum() for x in shards]) == 0) & finite
    return finite


def _total(values: list[Array]) -> Array:
    """The sum of 0-d values; those of a DTensor are that of one shard until they are summed."""
    sums: dict[Any, Array] = {}  # of each mesh: only those can be added
    for value in values:
        mesh = value.device_mesh if arrays.is_dtensor(value) else None
        sums[mesh] = sums[mesh] + value if mesh in sums else value
    return sum(x if mesh is None else x.full_tensor() for mesh, x in sums.items())


def _finite_sum(tensors: list[torch.Tensor]) -> bool:
    """Whether the sum is finite: it is only if all its terms are. One read and little memory."""
    if suits(tensors) and len({x.dtype for x in tensors}) == 1:
        few = (tensors[i : i + 256] for i in range(0, len(tensors), 256))
        tensors = [torch._utils._flatten_dense_tensors(leaves) for leaves in few]
    return math.isfinite(abs(sum(x.sum().item() for x in tensors)))


def nbytes(tree: Tree) -> int:
    """The size of all leaves in bytes."""
    return sum(
        x.numel() * x.element_size() if isinstance(x, torch.Tensor) else x.size * x.dtype.itemsize
        for x in leaves(tree)
    )
