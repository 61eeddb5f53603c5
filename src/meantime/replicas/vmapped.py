"""Replicas simulated in one process by `torch.func.vmap`.

The per-replica code runs unchanged inside `vmap`; the collectives are custom operators whose
vmap rule reduces over the batch dimension. They can be differentiated (`torch.func.grad` inside
or outside of the `vmap`), nested in further `vmap`s, and compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meantime import tree
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.replicas.base import check_groups, check_permutation, mean_by_sums, rotation
from meantime.replicas.messages import mean_of_trees
from meantime.tree import Tree


class Vmapped:
    """The replicas along the axis of the innermost enclosing `torch.func.vmap`.

    Args:
        size: the length of that axis.

    Inside `torch.compile`, `rank` is not available, and every `vmap` that encloses the call
    must have a different length: the level of the replicas is then found by its size.

    Raises:
        RuntimeError: a collective is called outside of `vmap`.
        ValueError: the axis has another length.

    Example:
        >>> import torch, meantime as mt
        >>> world = mt.Vmapped(4)
        >>> torch.func.vmap(lambda x: x - world.mean(x))(torch.tensor([0.0, 1.0, 2.0, 3.0]))
        tensor([-1.5000, -0.5000,  0.5000,  1.5000])
    """

    def __init__(self, size: int):
        if not (isinstance(size, int) and size >= 1):
            raise ValueError(f"the number of replicas must be a positive integer, got {size!r}")
        self.world = size
        self.size = size

    def __repr__(self) -> str:
        return f"Vmapped({self.world})" + (
            f".groups({self.size})" if self.size != self.world else ""
        )

    def groups(self, size: int) -> Vmapped:
        check_groups(self.size, size)
        grouped = Vmapped(self.world)
        grouped.size = size
        return grouped

    @property
    def rank(self) -> Tensor:
        return self._axis() % self.size

    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        def all_max(x: Tensor) -> Tensor:
            return self._gathered(x).amax(0)

        if codec is not None:
            return mean_of_trees(tree, weight, codec, self.size, self._gathered, all_max)
        return mean_by_sums(tree, weight, self.size, lambda x: self._exchange("sum", x), all_max)

    def gather(self, values: Tree) -> Tree:
        return tree.map(self._gathered, values)

    def permute(self, values: Tree, sources: Sequence[int]) -> Tree:
        ranks = check_permutation(sources, self.size)
        return tree.map(lambda x: self._exchange("permute", x, ranks), values)

    def shift(self, values: Tree, by: int) -> Tree:
        return self.permute(values, rotation(by, self.size))

    def broadcast(self, values: Tree, root: int = 0) -> Tree:
        return tree.map(lambda x: self._gathered(x)[root], values)

    def _gathered(self, x: Tensor) -> Tensor:
        return self._exchange("gather", x)

    def _exchange(self, kind: str, x: Tensor, sources: Sequence[int] = ()) -> Tensor:
        if torch.compiler.is_compiling():
            return _exchange(x, x, kind, self.world, self.size, sources)
        arguments = (x, self._axis(), kind, self.world, self.size, sources)
        exchanged: Tensor = _Exchange.apply(*arguments)  # type: ignore[no-untyped-call]
        return exchanged

    def _axis(self) -> Tensor:
        functorch = torch._C._functorch
        stack = functorch.get_interpreter_stack() or []
        levels = [i for i in stack if i.key() == functorch.TransformType.Vmap]
        if not levels:
            raise RuntimeError(f"{self!r} has no replicas here: call it inside torch.func.vmap")
        length = functorch.CVmapInterpreterPtr(levels[-1]).batchSize()
        if length != self.world:
            raise ValueError(f"{self!r} is used inside a vmap over an axis of length {length}")
        axis: Tensor = functorch._add_batch_dim(torch.arange(length), 0, levels[-1].level())
        return axis


# What the collectives do, with values stacked as (group, member, ...). Of the results, those
# that all replicas share need no replica axis.


def _together(kind: str, stacked: Tensor, sources: Sequence[int]) -> tuple[Tensor, int | None]:
    groups, size = stacked.shape[:2]
    if kind == "permute":
        return stacked[:, list(sources)].flatten(0, 1), 0
    result = stacked.sum(1) if kind == "sum" else stacked
    # A custom operator must not return a view of what it was given.
    return (result[0].clone(), None) if groups == 1 else (result.repeat_interleave(size, 0), 0)


def _alike(kind: str, x: Tensor, size: int) -> Tensor:
    """The result where all replicas share `x`."""
    if kind == "permute":
        return x.clone()
    return x * size if kind == "sum" else x.expand(size, *x.shape).clone()


def _vmap_rule(  # type: ignore[no-untyped-def]
    info, in_dims, x, level, kind, world, size, sources
) -> tuple[Tensor, int | None]:
    if info.batch_size != world:
        raise ValueError(
            f"Vmapped({world}) is used inside a vmap over an axis of length {info.batch_size}"
        )
    dim = in_dims[0]
    x = x.expand(world, *x.shape) if dim is None else x.movedim(dim, 0)
    return _together(kind, x.unflatten(0, (world // size, size)), sources)


class _Exchange(torch.autograd.Function):
    """A collective; `level` is only there to be batched at the level of the replicas."""

    generate_vmap_rule = False
    vmap = staticmethod(_vmap_rule)

    @staticmethod
    def forward(
        x: Tensor, level: Tensor, kind: str, world: int, size: int, sources: Sequence[int]
    ) -> Tensor:
        return _alike(kind, x, size)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _, level, *ctx.geometry = inputs
        ctx.save_for_backward(level)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (level,) = ctx.saved_tensors
        kind, world, size, sources = ctx.geometry
        if kind == "gather":
            raise NotImplementedError("Vmapped.gather cannot be differentiated inside of vmap")
        inverse = [sources.index(rank) for rank in range(len(sources))]
        arguments = (grad, level, kind, world, size, inverse)
        exchanged = _Exchange.apply(*arguments)  # type: ignore[no-untyped-call]
        return exchanged, None, None, None, None, None


# `torch.compile` does not see the vmap rule of an autograd function, but that of an operator.
@torch.library.custom_op("meantime::exchange", mutates_args=())
def _exchange(
    x: Tensor, level: Tensor, kind: str, world: int, size: int, sources: Sequence[int]
) -> Tensor:
    return _alike(kind, x, size)


@_exchange.register_fake
def _(x: Tensor, level: Tensor, kind: str, world: int, size: int, sources: Sequence[int]) -> Tensor:
    return x.new_empty(size, *x.shape) if kind == "gather" else torch.empty_like(x)


_exchange.register_vmap(_vmap_rule)
