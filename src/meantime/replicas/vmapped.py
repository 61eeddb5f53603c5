"""Replicas simulated in one process by `torch.func.vmap`.

The per-replica code runs unchanged inside `vmap`; the collectives are custom operators whose
vmap rule reduces over the batch dimension. They can be differentiated (`torch.func.grad` inside
or outside of the `vmap`), nested in further `vmap`s, and compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meantime import tree
from meantime.arrays import Array
from meantime.replicas.base import check_groups, mean_by_sums
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

    def mean(self, tree: Tree, *, weight: Array | None = None, donate: bool = False) -> Tree:
        return mean_by_sums(
            tree, weight, self.size, self._all_sum, lambda x: self._gathered(x).amax(0)
        )

    def gather(self, values: Tree) -> Tree:
        return tree.map(self._gathered, values)

    def shift(self, values: Tree, by: int) -> Tree:
        def one(x: Tensor) -> Tensor:
            return _shift(x, self._level(x), self.world, self.size, by)

        return tree.map(one, values)

    def broadcast(self, values: Tree, root: int = 0) -> Tree:
        return tree.map(lambda x: self._gathered(x)[root], values)

    def _all_sum(self, x: Tensor) -> Tensor:
        return _all_sum(x, self._level(x), self.world, self.size)

    def _gathered(self, x: Tensor) -> Tensor:
        return _gather(x, self._level(x), self.world, self.size)

    def _level(self, x: Tensor) -> Tensor:
        """A tensor batched at the replicas' level: it makes the vmap rule of that level run,
        also for an `x` that all replicas share."""
        return x if torch.compiler.is_compiling() else self._axis()

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


# The operators. Called outside of the replicas' vmap (all replicas share `x`) they act on equal
# replicas; the vmap rules below do the work. `level` is not read.


@torch.library.custom_op("meantime::all_sum", mutates_args=())
def _all_sum(x: Tensor, level: Tensor, world: int, size: int) -> Tensor:
    return x * size


@torch.library.custom_op("meantime::gather", mutates_args=())
def _gather(x: Tensor, level: Tensor, world: int, size: int) -> Tensor:
    return x.expand(size, *x.shape).clone()


@torch.library.custom_op("meantime::shift", mutates_args=())
def _shift(x: Tensor, level: Tensor, world: int, size: int, by: int) -> Tensor:
    return x.clone()


@_all_sum.register_fake
def _(x: Tensor, level: Tensor, world: int, size: int) -> Tensor:
    return torch.empty_like(x)


@_gather.register_fake
def _(x: Tensor, level: Tensor, world: int, size: int) -> Tensor:
    return x.new_empty(size, *x.shape)


@_shift.register_fake
def _(x: Tensor, level: Tensor, world: int, size: int, by: int) -> Tensor:
    return torch.empty_like(x)


def _stacked(x: Tensor, dim: int | None, length: int, world: int, size: int) -> Tensor:
    """All replicas' values with axes (group, member, ...)."""
    if length != world:
        raise ValueError(f"Vmapped({world}) is used inside a vmap over an axis of length {length}")
    x = x.expand(world, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.unflatten(0, (world // size, size))


@_all_sum.register_vmap
def _(info, in_dims, x, level, world, size):  # type: ignore[no-untyped-def]
    total = _stacked(x, in_dims[0], info.batch_size, world, size).sum(1)
    if size == world:
        return total[0], None
    return total.repeat_interleave(size, 0), 0


@_gather.register_vmap
def _(info, in_dims, x, level, world, size):  # type: ignore[no-untyped-def]
    groups = _stacked(x, in_dims[0], info.batch_size, world, size)
    if size == world:
        return groups[0].clone(), None
    return groups.repeat_interleave(size, 0), 0


@_shift.register_vmap
def _(info, in_dims, x, level, world, size, by):  # type: ignore[no-untyped-def]
    groups = _stacked(x, in_dims[0], info.batch_size, world, size)
    return groups.roll(by, 1).flatten(0, 1), 0


def _keep_geometry(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.level, ctx.geometry = inputs[1], inputs[2:]


def _all_sum_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _all_sum(grad, ctx.level, *ctx.geometry), None, None, None


def _shift_backward(ctx, grad):  # type: ignore[no-untyped-def]
    *geometry, by = ctx.geometry
    return _shift(grad, ctx.level, *geometry, -by), None, None, None, None


_all_sum.register_autograd(_all_sum_backward, setup_context=_keep_geometry)
_shift.register_autograd(_shift_backward, setup_context=_keep_geometry)
