"""Anchors: parameters that a replica comes back to, kept in at least float32."""

from __future__ import annotations

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.tree import Tree, cast_like, copy, leafwise


def anchor_of(params: Tree, who: str) -> Tree:
    """A copy of the parameters in at least float32.

    Raises:
        TypeError: a leaf is an integer or a bool, which takes no fractions of steps.
    """
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not arrays.is_inexact(leaf):
            raise TypeError(
                f"{who}(...) steps floating point parameters, but {path or 'the parameter'} "
                f"is {leaf.dtype}: keep it out of the tree"
            )
    return copy(params, wide=True)


@leafwise
def pseudo_gradient(anchor: Array, params: Array) -> Array:
    """What the local steps since the anchor amount to, old minus new."""
    return anchor - params


@leafwise
def descended(anchor: Array, direction: Array, rate: Array) -> Array:
    return anchor - rate * direction


def restarted(anchor: Tree, params: Tree) -> Tree:
    """The anchor as parameters, in memory of their own and in the dtypes of these."""
    return cast_like(copy(anchor), params)
