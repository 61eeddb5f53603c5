"""A whole step in one kernel.

`update` and `apply_updates` read and write every element several times. Where torch has a fused
kernel for the rule, `step` uses it instead: same mathematics, one pass over memory. The formulas
in the optimizers' own files stay the reference, which runs everywhere else (JAX, `torch.func`,
`torch.compile`, tensor subclasses, mixed dtypes) and which the kernels are tested against.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

from meantime._foreach import transforming
from meantime.control import LAST
from meantime.transform import Transform
from meantime.tree import Tree

Columns = list[list[Tensor]]
Kernel = Callable[[Columns, int], None]
"""`(columns, count)`: steps columns of parameters, gradients and slots in place, where `count`
updates were made before (0 for a rule that does not count)."""


def with_kernel(tx: Transform, kernel: Kernel) -> Transform:
    """A chain whose `update` also offers `apply`: `update` and `apply_updates` in one.

    Args:
        tx: the reference, a chain of members whose states have a `count`, slots shaped like
            the parameters, or neither.
        kernel: what steps the columns; the slots come in the order of the members' fields.
    """
    known: list[_Known] = []  # the last few, for a transform that steps several models

    def apply(
        updates: Tree, state: Any, params: Tree, *, donate: bool = False, **extra: Any
    ) -> tuple[Tree, Any] | None:
        if torch.compiler.is_compiling() or transforming():
            return None
        slots: list[Tree] = []
        counts: list[Tensor] = []
        for member in state:
            for name in member._fields:
                (counts if name == "count" else slots).append(getattr(member, name))
        trees = [params, updates, *slots]
        for kind in known:
            if (columns := kind.columns(trees)) is not None:
                break
        else:
            new = _learn(trees)
            if new is None or (columns := new.columns(trees)) is None:
                return None
            known[:] = [kind := new, *known[:3]]
        if not donate:
            read_only = 1  # the gradients
            columns = [
                column if i == read_only else list(torch._foreach_clone(column))
                for i, column in enumerate(columns)
            ]
            params, _, *slots = map(kind.spec.unflatten, columns)
        with torch.no_grad():
            kernel(columns, int(counts[0]) if counts else 0)
        following = iter(slots)
        after = []
        for member in state:
            values = [
                _incremented(member.count) if name == "count" else next(following)
                for name in member._fields
            ]
            after.append(member._make(values))
        return params, tuple(after)

    tx.update.apply = apply  # type: ignore[attr-defined]
    return tx


def _incremented(count: Tensor) -> Tensor:
    """`control.increment` of a number that Python code may ask for, in less than half the time."""
    return torch.full((), min(int(count) + 1, LAST), dtype=torch.int32)


class _Known(NamedTuple):
    """Trees which the kernels take. To look at every leaf of a tree costs more than the kernel if
    the leaves are small, so what was found is compared in one go the next time."""

    spec: Any
    guards: TensorGuards  # of types, dtypes, devices, shapes and strides
    ungraded: bool  # whether some require gradients, which is no matter without gradients

    def columns(self, trees: list[Tree]) -> Columns | None:
        """The leaves, if all is as it was found."""
        if self.ungraded and torch.is_grad_enabled():
            return None
        try:
            columns = [self.spec.flatten_up_to(tree) for tree in trees]
            known = self.guards.check(*itertools.chain.from_iterable(columns))
        except (TypeError, ValueError):  # another structure, something else than a tensor
            return None
        return columns if known else None


def _learn(trees: list[Tree]) -> _Known | None:
    """Look at the leaves: the kernels take plain floating tensors of one dtype and device, laid
    out alike in memory, which they walk through without a look at shapes and strides."""
    params, spec = optree.tree_flatten(trees[0])
    columns = [params, *(spec.flatten_up_to(tree) for tree in trees[1:])]
    tensors = [leaf for column in columns for leaf in column]
    if not params or not all(type(x) in (Tensor, Parameter) for x in tensors):
        return None
    ungraded = any(x.requires_grad for x in tensors)
    first = params[0]
    if (
        (ungraded and torch.is_grad_enabled())
        or not first.is_floating_point()
        or first.device.type not in ("cpu", "cuda")
        or any(x.dtype != first.dtype or x.device != first.device for x in tensors)
        or any(x.layout is not torch.strided for x in tensors)
        or not all(map(_laid_out_alike, zip(*columns, strict=True)))
    ):
        return None
    sizes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return _Known(spec, guards, ungraded)


def _laid_out_alike(row: tuple[Tensor, ...]) -> bool:
    first = row[0]
    return all(x.shape == first.shape for x in row) and (
        all(x.is_contiguous() for x in row)
        or (
            first.ndim == 4 and all(x.is_contiguous(memory_format=torch.channels_last) for x in row)
        )
    )
