"""Replicas along a named axis of a JAX computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meantime import tree
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.replicas.base import check_groups, check_permutation, mean_by_sums, rotation
from meantime.replicas.messages import mean_of_trees
from meantime.tree import Tree


class NamedAxis:
    """The replicas along a mesh axis of `jax.shard_map`, or an axis of `jax.vmap` or `jax.pmap`.

    Args:
        name: the name of the axis, or a tuple of names for all replicas of a mesh with several.
            For hierarchy, use the axes of a mesh:
            `replicas={"node": NamedAxis("worker"), "world": NamedAxis(("node", "worker"))}`.

    Example:
        >>> import jax, jax.numpy as jnp, meantime as mt
        >>> world = mt.NamedAxis("replica")
        >>> jax.vmap(lambda x: x - world.mean(x), axis_name="replica")(jnp.arange(3.0)).tolist()
        [-1.0, 0.0, 1.0]
    """

    def __init__(self, name: str | tuple[str, ...]):
        self.name = name
        self._group: int | None = None

    def __repr__(self) -> str:
        return f"NamedAxis({self.name!r})" + (f".groups({self._group})" if self._group else "")

    def groups(self, size: int) -> NamedAxis:
        grouped = NamedAxis(self.name)
        grouped._group = size
        return grouped

    @property
    def size(self) -> int:
        world = self._world()
        if self._group is None:
            return world
        check_groups(world, self._group)
        return self._group

    @property
    def rank(self) -> Array:
        import jax

        return jax.lax.axis_index(self.name) % self.size

    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        if codec is not None:
            exchange = self._exchanged if self._group is None else None
            return mean_of_trees(
                tree, weight, codec, self.size, self._gathered, self._max, exchange
            )
        return mean_by_sums(tree, weight, self.size, self._sum, self._max)

    def gather(self, values: Tree) -> Tree:
        return tree.map(self._gathered, values)

    def permute(self, values: Tree, sources: Sequence[int]) -> Tree:
        import jax

        size = self.size
        ranks = check_permutation(sources, size)
        pairs = [(i // size * size + ranks[i % size], i) for i in range(self._world())]
        return tree.map(lambda x: jax.lax.ppermute(x, self.name, pairs), values)

    def shift(self, values: Tree, by: int) -> Tree:
        return self.permute(values, rotation(by, self.size))

    def broadcast(self, values: Tree, root: int = 0) -> Tree:
        return tree.map(lambda x: self._gathered(x)[root], values)

    def _world(self) -> int:
        import jax

        return int(jax.lax.axis_size(self.name))

    def _sum(self, x: Any) -> Any:
        import jax

        return jax.lax.psum(x, self.name) if self._group is None else self._gathered(x).sum(0)

    def _max(self, x: Any) -> Any:
        import jax

        if self._group is not None:
            return self._gathered(x).max(0)
        if x.dtype == bool:  # has no maximum in a collective
            return jax.lax.pmax(x.astype("int32"), self.name).astype(x.dtype)
        return jax.lax.pmax(x, self.name)

    def _exchanged(self, rows: Any) -> Any:
        import jax

        return jax.lax.all_to_all(rows, self.name, 0, 0)

    def _gathered(self, x: Any) -> Any:
        import jax

        everyone = jax.lax.all_gather(x, self.name)
        size = self.size
        if size == self._world():
            return everyone
        start = jax.lax.axis_index(self.name) // size * size
        return jax.lax.dynamic_slice_in_dim(everyone, start, size)
