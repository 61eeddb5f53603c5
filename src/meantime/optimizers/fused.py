"""A whole step in one kernel.

`update` and `apply_updates` read and write every element several times. Where torch has a fused
kernel for the rule, `step` uses it instead: same mathematics, one pass over memory. The formulas
in the optimizers' own files stay the reference, which runs everywhere else (JAX, `torch.func`,
`torch.compile`, tensor subclasses, mixed dtypes) and which the kernels are tested against.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from meantime._foreach import transforming
from meantime.arrays import Array
from meantime.control import increment
from meantime.transform import Transform
from meantime.tree import Tree

Kernel = Callable[[list[list[Tensor]], Array], None]
"""`(columns, count)`: steps columns of parameters, gradients and slots in place, where `count`
updates were made before (a 0-d int32, or None for a rule that does not count)."""


def with_kernel(tx: Transform, kernel: Kernel) -> Transform:
    """A chain whose `update` also offers `apply`: `update` and `apply_updates` in one.

    Args:
        tx: the reference, a chain of members whose states have a `count`, slots shaped like
            the parameters, or neither.
        kernel: what steps the columns; the slots come in the order of the members' fields.
    """

    def apply(
        updates: Tree, state: Any, params: Tree, *, donate: bool = False, **extra: Any
    ) -> tuple[Tree, Any] | None:
        fields = [(member, name) for member in state for name in member._fields]
        counts = [member.count for member, name in fields if name == "count"]
        slots = [getattr(member, name) for member, name in fields if name != "count"]
        flat, spec = optree.tree_flatten(params)
        columns = [flat, *(spec.flatten_up_to(tree) for tree in (updates, *slots))]
        if not flat or not _suits(columns):
            return None
        if not donate:
            read_only = 1  # the gradients
            columns = [
                column if i == read_only else list(torch._foreach_clone(column))
                for i, column in enumerate(columns)
            ]
        with torch.no_grad():
            kernel(columns, counts[0] if counts else None)
        params, _, *slots = (spec.unflatten(column) for column in columns)
        following = iter(slots)
        return params, tuple(
            member._replace(
                **{
                    name: increment(member.count) if name == "count" else next(following)
                    for name in member._fields
                }
            )
            for member in state
        )

    tx.update.apply = apply  # type: ignore[attr-defined]
    return tx


# One pass of the interpreter over hundreds of leaves costs more than the kernel: these run in C.
_dtype, _device, _layout, _shape, _requires_grad = (
    operator.attrgetter(name) for name in ("dtype", "device", "layout", "shape", "requires_grad")
)


def _suits(columns: list[list[Any]]) -> bool:
    """Whether the kernels take these tensors: plain, floating, of one dtype and device, and laid
    out alike in memory, which the kernels walk through without a look at shapes and strides."""
    if torch.compiler.is_compiling() or transforming():
        return False
    tensors = list(itertools.chain.from_iterable(columns))
    if not set(map(type, tensors)) <= {Tensor, Parameter}:
        return False
    if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
        return False
    params, grads = columns[:2]  # the slots were made like the parameters
    dtypes, devices = set(map(_dtype, tensors)), set(map(_device, params + grads))
    return (
        len(dtypes) == len(devices) == 1
        and dtypes.pop().is_floating_point
        and devices.pop().type in ("cpu", "cuda")
        and set(map(_layout, grads)) == {torch.strided}
        and list(map(_shape, params)) == list(map(_shape, grads))
        and (
            all(map(Tensor.is_contiguous, tensors))
            or all(map(_laid_out_alike, zip(*columns, strict=True)))
        )
    )


def _laid_out_alike(row: tuple[Tensor, ...]) -> bool:
    return all(x.is_contiguous() for x in row) or (
        row[0].ndim == 4 and all(x.is_contiguous(memory_format=torch.channels_last) for x in row)
    )
