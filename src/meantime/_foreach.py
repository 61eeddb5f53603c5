"""All leaves of a tree at once: an operand whose arithmetic runs through `torch._foreach_*`.

A leafwise formula is ordinary arithmetic on its arguments. Given `Leaves` instead of tensors,
the same formula costs one call an operation instead of one call an operation and leaf, which
is what counts for many small leaves. The results are those of the leaf-by-leaf loop, bit for
bit; an operation without a foreach kernel (or with a scalar it does not take) runs that loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# On CPU the foreach kernels are loops over the leaves that only save the interpreter's time,
# and every intermediate result leaves the cache when the leaves are large.
SMALL_LEAF = 16_384


def suits(tensors: list[Tensor]) -> bool:
    """Whether these plain torch tensors are better treated all at once."""
    if len(tensors) < 2:
        return False
    device = tensors[0].device
    if any(t.device != device for t in tensors):
        return False
    return device.type != "cpu" or sum(t.numel() for t in tensors) < SMALL_LEAF * len(tensors)


def plain(value: Any) -> bool:
    """A torch tensor with torch's own kernels (no subclass such as DTensor)."""
    return type(value) is Tensor or type(value) is torch.nn.Parameter


def transforming() -> bool:
    """Whether a `torch.func` transform (vmap, grad, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Leaves:
    """One tensor per leaf, with the arithmetic of a tensor."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors

    def __add__(self, other: Any) -> Leaves:
        return self._binary(torch._foreach_add, torch.add, other)

    def __sub__(self, other: Any) -> Leaves:
        return self._binary(torch._foreach_sub, torch.sub, other)

    def __mul__(self, other: Any) -> Leaves:
        return self._binary(torch._foreach_mul, torch.mul, other)

    def __truediv__(self, other: Any) -> Leaves:
        return self._binary(torch._foreach_div, torch.div, other)

    def __rsub__(self, other: Any) -> Leaves:
        return self.each(lambda tensor: other - tensor)

    def __rtruediv__(self, other: Any) -> Leaves:
        return self.each(lambda tensor: other / tensor)

    # A 0-d tensor on the left stays there: half precision rounds it first there, not on the right.
    def __radd__(self, other: Any) -> Leaves:
        return self + other if isinstance(other, (int, float)) else self.each(lambda x: other + x)

    def __rmul__(self, other: Any) -> Leaves:
        return self * other if isinstance(other, (int, float)) else self.each(lambda x: other * x)

    def __pow__(self, exponent: Any) -> Leaves:
        return self.each(lambda tensor: tensor**exponent)

    def __neg__(self) -> Leaves:
        return Leaves(list(torch._foreach_neg(self.tensors)))

    def __lt__(self, other: Any) -> Leaves:
        return self.each(torch.lt, other)

    def __gt__(self, other: Any) -> Leaves:
        return self.each(torch.gt, other)

    def __le__(self, other: Any) -> Leaves:
        return self.each(torch.le, other)

    def __ge__(self, other: Any) -> Leaves:
        return self.each(torch.ge, other)

    def _binary(
        self, foreach: Callable[..., Any], loop: Callable[..., Tensor], other: Any
    ) -> Leaves:
        if isinstance(other, Leaves):
            return Leaves(list(foreach(self.tensors, other.tensors)))
        if isinstance(other, (int, float)) or self._takes(foreach, other):
            return Leaves(list(foreach(self.tensors, other)))
        return self.each(loop, other)

    def _takes(self, foreach: Callable[..., Any], other: Any) -> bool:
        """Whether the kernel takes this 0-d tensor as the scalar for all leaves."""
        has_kernel = foreach is not torch._foreach_sub
        return has_kernel and plain(other) and other.device == self.tensors[0].device

    def each(self, function: Callable[..., Tensor], *others: Any) -> Leaves:
        """`function(leaf, *others)` leaf by leaf; `others` are `Leaves` or shared scalars."""
        columns = [
            other.tensors if isinstance(other, Leaves) else [other] * len(self.tensors)
            for other in others
        ]
        return Leaves([function(*row) for row in zip(self.tensors, *columns, strict=True)])


def sqrt(x: Leaves) -> Leaves:
    return Leaves(list(torch._foreach_sqrt(x.tensors)))


def absolute(x: Leaves) -> Leaves:
    return Leaves(list(torch._foreach_abs(x.tensors)))


def sign(x: Leaves) -> Leaves:
    return Leaves(list(torch._foreach_sign(x.tensors)))
