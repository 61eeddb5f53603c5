"""One replica."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.codecs.layout import decoded
from meantime.replicas.base import check_groups, check_permutation, rotation
from meantime.tree import Tree


class Solo:
    """A world of one replica, whose mean is itself, bit for bit; with a codec, what arrives.

    Example:
        >>> import torch, meantime as mt
        >>> mt.Solo().mean(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """

    size = 1
    rank = 0

    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        if codec is not None:
            tree = decoded(codec, tree)
        return tree if weight is None else _scaled_by_nothing(tree, weight)

    def gather(self, values: Tree) -> Tree:
        return tree.map(lambda x: x[None], values)

    def permute(self, tree: Tree, sources: Sequence[int]) -> Tree:
        check_permutation(sources, self.size)
        return tree

    def shift(self, tree: Tree, by: int) -> Tree:
        return self.permute(tree, rotation(by, self.size))

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        if root != 0:
            raise ValueError(f"root must be 0 in a world of one replica, got {root!r}")
        return tree

    def groups(self, size: int) -> Solo:
        check_groups(self.size, size)
        return self

    def __repr__(self) -> str:
        return "Solo()"


def _scaled_by_nothing(values: Tree, weight: Array) -> Tree:
    """The values themselves, or NaN where the only replica has weight 0."""

    def one(x: Array) -> Array:
        if not arrays.is_inexact(x):
            return x
        return arrays.where(weight > 0, x, arrays.namespace(x).full_like(x, math.nan))

    return tree.map(one, values)
