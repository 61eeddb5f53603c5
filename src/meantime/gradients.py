"""Values and gradients of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from meantime import arrays, tree
from meantime._foreach import transforming


def value_and_grad(
    function: Callable[..., Any], argnums: int = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    r"""The value of a scalar function and its gradient with respect to one argument.

    The signature of `jax.value_and_grad`, for torch and JAX trees. On torch tensors outside of
    `torch.func` transforms this is one backward pass of plain autograd, which costs less than
    `torch.func.grad_and_value` for small models; inside of transforms it is that function.

    Args:
        function: returns a scalar, or `(scalar, aux)` if `has_aux`.
        argnums: which positional argument, a tree of floating point arrays, to differentiate for.
        has_aux: whether the function returns something else along with the scalar.

    Returns:
        A function of the same arguments that returns `(value, grads)`; the value is
        `(scalar, aux)` if `has_aux`. Leaves that the scalar does not depend on get zeros.

    Raises:
        TypeError: the value is not a scalar, or a leaf is not floating point.

    Example:
        >>> import torch, meantime as mt
        >>> loss = lambda params, x: (params["w"] * x).sum() ** 2
        >>> value, grads = value_and_grad(loss)({"w": torch.tensor([1.0, 2.0])}, torch.ones(2))
        >>> value, grads
        (tensor(9.), {'w': tensor([6., 6.])})
    """

    def run(*arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        leaves, spec = optree.tree_flatten(arguments[argnums])
        if leaves and not isinstance(leaves[0], torch.Tensor):
            import jax

            transformed = jax.value_and_grad(function, argnums, has_aux)
            return transformed(*arguments, **keywords)
        if transforming() or torch.compiler.is_compiling():
            grads, value = torch.func.grad_and_value(function, argnums, has_aux)(
                *arguments, **keywords
            )
            return value, grads
        if not all(arrays.is_inexact(leaf) for leaf in leaves):
            kinds = zip(tree.paths(arguments[argnums]), leaves, strict=True)
            path, dtype = next((p, x.dtype) for p, x in kinds if not arrays.is_inexact(x))
            raise TypeError(f"value_and_grad needs floating point leaves, {path} is {dtype}")
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            replaced = list(arguments)
            replaced[argnums] = spec.unflatten(inputs)
            result = function(*replaced, **keywords)
            value, aux = result if has_aux else (result, None)
            if not isinstance(value, torch.Tensor) or value.dim() != 0:
                shape = list(getattr(value, "shape", [])) or type(value).__name__
                raise TypeError(f"value_and_grad needs a scalar (a 0-d tensor), got {shape}")
            grads = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        value = value.detach()
        if has_aux:
            value = (value, tree.map(_detached, aux))
        return value, spec.unflatten(grads)

    return run


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x
