"""Conditionals and counters for every world.

`cond` runs one of two branches. What "one of" means depends on where the predicate lives:

| predicate | what happens |
|---|---|
| a Python bool, an eager torch tensor, a concrete JAX or NumPy array | a Python branch |
| a torch tensor that differs along a `vmap` axis | both branches, and a select |
| inside `torch.compile` | `torch.cond`: one branch runs |
| a JAX tracer | `jax.lax.cond`: one branch runs (a select under `jax.vmap`) |

A branch that was not taken never leaks: the select is `where`, not arithmetic with booleans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from meantime import arrays, tree
from meantime.arrays import Array

LAST = 2**31 - 1  # counters stay here when they would overflow


def counter(params: Any, *, local: bool = False) -> Array:
    """A 0-d int32 zero in the library of `params`.

    A torch counter lives on the CPU, so that asking whether a step is due never waits for an
    accelerator. `local` counters differ between replicas: under JAX's `shard_map` they have
    the varying type of the parameters from the start.

    Raises:
        TypeError: a leaf is no array; nearly every state counts, so that it is found here.
    """
    found = tree.leaves(params) or [_of_no_leaves(params)]
    for i, leaf in enumerate(found):
        if not arrays.is_array(leaf):
            where = tree.paths(params)[i] or "the tree"
            raise TypeError(
                f"parameters are trees of arrays, but {where} is of {type(leaf)!r}: leave it out "
                "(None), or register its class as a node with optree or jax.tree_util"
            )
    like = found[0]
    if local and not isinstance(like, torch.Tensor):
        return arrays.namespace(like).zeros_like(like, shape=(), dtype="int32")
    return arrays.zeros("int32", like=like)


def _of_no_leaves(params: Any) -> Array:
    """torch's, unless it is optax that masked the leaves out."""
    optax = sys.modules.get("optax")
    masked = optax and optree.tree_leaves(params, is_leaf=lambda x: type(x) is optax.MaskedNode)
    return sys.modules["jax"].numpy.zeros(0) if masked else torch.empty(0)


def increment(count: Array, counts: bool | Array = True) -> Array:
    """`count + 1` if this call counts, saturating at the largest int32."""
    room = count < LAST
    return count + (room if counts is True else room & counts)


def select(predicate: Array, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` if the 0-d predicate holds, else `no()`; where its value cannot be asked for, both
    are computed and their leaves selected. For branches that do not communicate."""
    if is_concrete(predicate):
        return yes() if predicate else no()
    return tree.map(lambda a, b: arrays.where(predicate, a, b), yes(), no())


def cond(predicate: Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """`yes(*operands)` if the 0-d predicate holds, else `no(*operands)`.

    Both branches return new operands: the same structure, shapes and dtypes.
    """
    if is_concrete(predicate):
        return yes(*operands) if predicate else no(*operands)
    if not isinstance(predicate, torch.Tensor):
        return _jax_cond(predicate, yes, no, operands)
    if _batched(predicate):
        return select(predicate, lambda: yes(*operands), lambda: no(*operands))
    return _torch_cond(predicate, yes, no, operands)


def switch(index: Array, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """`branches[index](*operands)` of a 0-d index.

    Every branch returns a tuple of new operands, as those of `cond`.
    """
    if len(branches) == 1:
        return branches[0](*operands)
    half = len(branches) // 2
    return cond(
        index < half,
        lambda *values: switch(index, branches[:half], *values),
        lambda *values: switch(index - half, branches[half:], *values),
        *operands,
    )


def is_concrete(x: Array) -> bool:
    """Whether Python code may ask for the value of `x`."""
    if isinstance(x, torch.Tensor):
        return not (torch.compiler.is_compiling() or _batched(x))
    if not arrays.is_array(x) or arrays.namespace(x).__name__ != "jax.numpy":
        return True
    import jax

    return not isinstance(x, jax.core.Tracer)


def as_flag(now: bool | Array) -> bool | Array:
    """A bool where its value can be asked for: NumPy's do not combine with torch's counters."""
    return bool(now) if is_concrete(now) else now


def _batched(x: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    if torch.compiler.is_compiling():  # Dynamo traces this question and no other one
        return functorch.is_batchedtensor(x)
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _torch_cond(
    predicate: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: Any
) -> Any:
    flat, spec = optree.tree_flatten(operands)

    def on_leaves(branch: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
        def run(*values: torch.Tensor) -> list[torch.Tensor]:
            # Results of `torch.cond` must not alias its operands.
            return [result.clone() for result in tree.leaves(branch(*spec.unflatten(values)))]

        return run

    return spec.unflatten(torch.cond(predicate, on_leaves(yes), on_leaves(no), tuple(flat)))


def _jax_cond(
    predicate: Array, yes: Callable[..., Any], no: Callable[..., Any], operands: Any
) -> Any:
    import jax

    def varying(x: Any) -> frozenset[str]:
        return frozenset(getattr(x.manual_axis_type, "varying", ()) or ())

    def axes(value: Any) -> list[frozenset[str]]:
        return [varying(jax.typeof(x)) for x in jax.tree.leaves(value)]

    if not any(axes((predicate, operands))):
        return jax.lax.cond(predicate, yes, no, *operands)
    # Inside `shard_map(check_vma=True)` a mean is the same on all replicas and the values it
    # replaces are not: both branches are cast to the axes over which either result varies.
    results = [jax.tree.leaves(jax.eval_shape(branch, *operands)) for branch in (yes, no)]
    union = [varying(a) | varying(b) for a, b in zip(*results, strict=True)]

    def as_union(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            flat, structure = jax.tree.flatten(branch(*values))
            flat = [_to_varying(x, target) for x, target in zip(flat, union, strict=True)]
            return jax.tree.unflatten(structure, flat)

        return run

    return jax.lax.cond(predicate, as_union(yes), as_union(no), *operands)


def _to_varying(x: Any, axes: frozenset[str]) -> Any:
    import jax

    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
