"""One vocabulary for torch tensors, JAX and NumPy arrays, and Python numbers.

Formulas use operators and the functions named here; each looks at its arguments and calls the
library they come from. JAX is never imported: an array that exists brings its own namespace
(`__array_namespace__`, the array API standard).
"""

from __future__ import annotations

import builtins
import math
from types import SimpleNamespace
from typing import Any

import torch

from meantime import _foreach
from meantime._foreach import Leaves, plain

Array = Any  # torch.Tensor, jax.Array, numpy.ndarray

_numbers = SimpleNamespace(
    sqrt=math.sqrt,
    exp=lambda x: math.exp(x) if x < 709 else math.inf,
    expm1=math.expm1,
    cos=math.cos,
    log=lambda x: math.log(x) if x > 0 else -math.inf,
    abs=builtins.abs,
    sign=lambda x: math.copysign(1.0, x) if x else 0.0,
    floor=math.floor,
    where=lambda condition, a, b: a if condition else b,
)


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "__array_namespace__")


def is_dtensor(value: Any) -> bool:
    """A torch tensor of which this process holds a shard."""
    return not plain(value) and hasattr(value, "device_mesh")


def namespace(*values: Any) -> Any:
    """The module whose functions work on these values.

    torch and JAX go before NumPy, whose scalars mix with both; numbers alone use `math`.
    """
    found: Any = None
    for value in values:
        if isinstance(value, torch.Tensor):
            return torch
        if hasattr(value, "__array_namespace__"):
            found = value.__array_namespace__()
            if found.__name__ != "numpy":
                return found
    return found or _numbers


def sqrt(x: Array) -> Array:
    return _foreach.sqrt(x) if isinstance(x, Leaves) else namespace(x).sqrt(x)


def abs(x: Array) -> Array:
    return _foreach.absolute(x) if isinstance(x, Leaves) else namespace(x).abs(x)


def sign(x: Array) -> Array:
    return _foreach.sign(x) if isinstance(x, Leaves) else namespace(x).sign(x)


def exp(x: Array) -> Array:
    return x.each(exp) if isinstance(x, Leaves) else namespace(x).exp(x)


def expm1(x: Array) -> Array:
    return x.each(expm1) if isinstance(x, Leaves) else namespace(x).expm1(x)


def log(x: Array) -> Array:
    return x.each(log) if isinstance(x, Leaves) else namespace(x).log(x)


def cos(x: Array) -> Array:
    return x.each(cos) if isinstance(x, Leaves) else namespace(x).cos(x)


def floor(x: Array) -> Array:
    return x.each(floor) if isinstance(x, Leaves) else namespace(x).floor(x)


def where(condition: Array, a: Array, b: Array) -> Array:
    """`a` where the condition holds, else `b`; NaN in the branch not taken does not leak."""
    if isinstance(condition, Leaves):
        return condition.each(where, a, b)
    if isinstance(a, Leaves):
        return a.each(lambda x, y: where(condition, x, y), b)
    if isinstance(b, Leaves):
        return b.each(lambda y: where(condition, a, y))
    if isinstance(condition, bool):
        return a if condition else b
    return namespace(condition, a, b).where(condition, a, b)


def maximum(a: Array, b: Array) -> Array:
    return where(a < b, b, a)


def minimum(a: Array, b: Array) -> Array:
    return where(a > b, b, a)


def is_inexact(x: Array) -> bool:
    """Floating or complex: what has a mean. Integers and bools have none."""
    if isinstance(x, torch.Tensor):
        return x.is_floating_point() or x.is_complex()
    return bool(x.__array_namespace__().isdtype(x.dtype, ("real floating", "complex floating")))


def astype(x: Array, dtype: Any) -> Array:
    """`x` in `dtype`; `x` itself where it has that dtype already."""
    if x.dtype == dtype:
        return x
    return x.to(dtype) if isinstance(x, torch.Tensor) else x.astype(dtype)


def wide_dtype(x: Array) -> Any:
    """The dtype in which values like `x` are accumulated: its own, and at least float32."""
    if isinstance(x, torch.Tensor):
        return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    xp = x.__array_namespace__()
    if xp.isdtype(x.dtype, "real floating") and xp.finfo(x.dtype).bits < 32:
        return xp.float32
    return x.dtype


def precise(x: Array) -> Array:
    """A 0-d torch value in float64, so that what is computed from it is as exact as from a Python
    number; it does not promote the arrays it meets. JAX and NumPy values pass unchanged."""
    return x.double() if isinstance(x, torch.Tensor) else x


def zeros(dtype: Any, *, like: Array) -> Array:
    """A 0-d zero of `dtype` (named as a string) in the library of `like`."""
    if isinstance(like, torch.Tensor):
        return torch.zeros((), dtype=getattr(torch, dtype))
    xp = namespace(like)
    return xp.zeros((), dtype=getattr(xp, dtype))


def all_finite(x: Array) -> Array:
    """Whether every element is finite, as a 0-d bool."""
    xp = namespace(x)
    return xp.all(xp.isfinite(x))
