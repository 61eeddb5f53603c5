"""Bridges between torch and JAX: the same memory, by DLPack, and optax on torch tensors.

Transforms need no bridge, they run on the arrays of either library. A bridge is for what belongs
to one of them: parameters on their way from one to the other, and the optimizers of optax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from meantime import tree
from meantime.arrays import Array
from meantime.keywords import CONTRACT, forwards
from meantime.made import made
from meantime.transform import Transform, as_transform
from meantime.tree import Tree

_WIDE = {torch.float64, torch.complex128, torch.int64, torch.uint64}


def to_jax(values: Tree, *, copy: bool | None = None) -> Tree:
    """Torch tensors as JAX arrays: the same numbers in the same dtypes.

    A tensor shares its memory with the array where JAX can use it as it is: dense (transposed or
    not) and, on CPU, at an address that is a multiple of 64 bytes. That holds for tensors which
    torch allocated, and not for most views. JAX takes arrays to be immutable: do not write to a
    tensor as long as an array that shares its memory is in use.

    Args:
        values: a tree of tensors. A parameter comes without its `requires_grad`.
        copy: None copies where memory cannot be shared, False refuses to, True always copies.

    Raises:
        TypeError: a leaf is no plain torch tensor.
        ValueError: a leaf has 64-bit numbers and JAX has not (it would keep half of the bits);
            it is part of a graph of derivatives, which end here; `copy=False` and it needs one.

    Example:
        >>> import torch, meantime.jax
        >>> meantime.jax.to_jax({"w": torch.ones(2, dtype=torch.bfloat16)})
        {'w': Array([1, 1], dtype=bfloat16)}
    """
    return _mapped(_to_jax, values, copy)


def to_torch(values: Tree, *, copy: bool | None = None) -> Tree:
    """JAX arrays as torch tensors: the same numbers in the same dtypes, in the same memory.

    What is written to such a tensor is written to the array, which JAX takes to be immutable, so
    that anything may follow. Pass `copy=True` for tensors that are trained in place: with
    `torch.optim`, `donate=True` or an adapter.

    Args:
        values: a tree of JAX arrays, each on one device.
        copy: True copies; None and False share the memory.

    Raises:
        TypeError: a leaf is no JAX array, or of a dtype that torch does not have.
        ValueError: a leaf is spread over several devices.

    Example:
        >>> import jax.numpy as jnp, meantime.jax
        >>> meantime.jax.to_torch({"w": jnp.arange(3.0)})
        {'w': tensor([0., 1., 2.])}
    """
    return _mapped(_to_torch, values, copy)


@made
def optax_on_torch(transformation: Any) -> Transform:
    """An optax transformation as a transform of torch tensors.

    `init` and `update` are compiled by `jax.jit`, once for each structure of the parameters, and
    take and return tensors without copying them (see `to_jax`). Every leaf of the new updates
    and the new state has memory of its own, so that `donate=True` may write to it.

    Args:
        transformation: anything with `.init` and `.update` that JAX can compile. Extra arguments
            of `update` are tensors or numbers.

    Raises:
        TypeError, ValueError: a leaf cannot cross; see `to_jax` and `to_torch`.

    Example:
        >>> import optax, torch, meantime as mt, meantime.jax
        >>> tx = mt.local_sgd(meantime.jax.optax_on_torch(optax.sign_sgd(0.1)), every=8)
        >>> params = torch.ones(2)
        >>> mt.step(tx, params, params, tx.init(params), replicas=mt.Solo())[0]
        tensor([0.9000, 0.9000])
    """
    inner = as_transform(transformation)

    @jax.jit
    def jitted_init(params: Tree) -> Any:
        return _without_keys(inner.init(params))

    @jax.jit
    def jitted_update(updates: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
        updates, state = inner.update(updates, _with_keys(state), params, **extra)
        return updates, _without_keys(state)

    def init(params: Tree) -> Any:
        return to_torch(jitted_init(to_jax(params)))

    @forwards(inner.update)
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        numbers = {name: value for name, value in extra.items() if name not in CONTRACT}
        numbers = {k: to_jax(v) if isinstance(v, torch.Tensor) else v for k, v in numbers.items()}
        return to_torch(jitted_update(*to_jax((updates, state, params)), **numbers))

    return Transform(init, update)


class KeyData(NamedTuple):
    """The numbers of a random key, which torch cannot hold, in its place."""

    data: Array


def _is_key(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def _without_keys(state: Any) -> Any:
    return jax.tree.map(lambda x: KeyData(jax.random.key_data(x)) if _is_key(x) else x, state)


def _with_keys(state: Any) -> Any:
    def key(x: Any) -> Any:
        return jax.random.wrap_key_data(x.data) if isinstance(x, KeyData) else x

    return jax.tree.map(key, state, is_leaf=lambda x: isinstance(x, KeyData))


def _mapped(convert: Callable[[Any, bool | None], Array], values: Tree, copy: bool | None) -> Tree:
    leaves, spec = tree.flatten(values)
    results = []
    for i, leaf in enumerate(leaves):
        try:
            results.append(convert(leaf, copy))
        except (TypeError, ValueError, BufferError) as error:
            where = tree.paths(values)[i] or "the leaf"
            raise type(error)(f"{convert.__name__[1:]}: {where} {error}") from error.__cause__
    return spec.unflatten(results)


def _to_jax(x: Any, copy: bool | None) -> Array:
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"is a {type(x).__name__}, not a plain torch tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TypeError("is inside a torch.func transform, out of which it cannot be taken")
    if not x.is_leaf:
        raise ValueError("has a derivative, which does not cross: call .detach() first")
    if x.dtype in _WIDE and jax.dtypes.canonicalize_dtype("float64") == "float32":
        raise ValueError(
            f"is {x.dtype}, of which JAX would keep half the bits: cast it, or call "
            'jax.config.update("jax_enable_x64", True) at the start of the program'
        )
    x = x.detach()
    lazy = x.is_conj() or x.is_neg()  # DLPack does not know of a sign to be applied later
    if not (copy or lazy):
        try:
            return jax.dlpack.from_dlpack(x, copy=False)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if copy is False:
                raise ValueError(f"needs a copy: {error}") from error
    elif copy is False:
        raise ValueError("needs a copy: it is conjugated or negated lazily")
    x = x.resolve_conj().resolve_neg()
    return jax.dlpack.from_dlpack(x.clone(memory_format=torch.contiguous_format))


def _to_torch(x: Any, copy: bool | None) -> Array:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        traced = ": it has no value inside a JAX transformation" if isinstance(x, jax.Array) else ""
        raise TypeError(f"is a {type(x).__name__}, not a JAX array{traced}")
    if _is_key(x):
        raise TypeError(f"is a random key, {x.dtype}: take its jax.random.key_data(...)")
    if len(x.devices()) > 1:
        raise ValueError(
            f"is spread over {len(x.devices())} devices: take the shard of one, "
            ".addressable_shards[i].data, or bring it to one with jax.device_put"
        )
    try:
        shared = torch.utils.dlpack.from_dlpack(x)
    except (BufferError, jax.errors.JaxRuntimeError) as error:
        raise TypeError(f"is {x.dtype}, which torch cannot take: {error}") from error
    return shared.clone() if copy else shared
