"""How the leaves of a tree lie in the vector that is compressed.

All floating and complex leaves, in the order of optree, each in row-major order, complex numbers
as pairs, are one float32 vector. It is the same in every world of replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.codecs.base import Codec
from meantime.tree import Tree


def decoded(codec: Codec, values: Tree) -> Tree:
    """What arrives of a tree, in its own dtypes; integers and bools as they are."""
    return on_vector(codec.roundtrip, values)


def on_vector(
    function: Callable[[Array], Array], values: Tree, other: Callable[[Array], Array] = lambda x: x
) -> Tree:
    """The tree with `function(vector)` for its vector and `other(leaf)` for other leaves."""
    leaves, spec = optree.tree_flatten(values)
    parts = [_flat(local(x)) for x in leaves if arrays.is_inexact(x)]
    if not parts:
        return tree.map(other, values)
    vector = function(arrays.namespace(*parts).concatenate(parts))
    results = []
    start = 0
    for x in leaves:
        if arrays.is_inexact(x):
            end = start + _length(local(x))
            results.append(_shaped(vector[start:end], x))
            start = end
        else:
            results.append(other(x))
    return spec.unflatten(results)


def nbytes(values: Tree, codec: Codec | None) -> int:
    """The size in bytes of a message that holds the tree."""
    if codec is None:
        return tree.nbytes(values)
    compressed = [local(x) for x in tree.leaves(values) if arrays.is_inexact(x)]
    others = [x for x in tree.leaves(values) if not arrays.is_inexact(x)]
    return codec.nbytes(sum(map(_length, compressed))) + tree.nbytes(others)


def local(x: Array) -> Array:
    """The shard of a DTensor that this process holds; any other array itself."""
    return x.to_local() if arrays.is_dtensor(x) else x


def _length(x: Array) -> int:
    size = x.numel() if isinstance(x, torch.Tensor) else x.size
    return 2 * size if _is_complex(x) else size


def _is_complex(x: Array) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_complex()
    return bool(arrays.namespace(x).isdtype(x.dtype, "complex floating"))


def _flat(x: Array) -> Array:
    xp = arrays.namespace(x)
    if _is_complex(x):
        x = xp.stack([x.real, x.imag], -1)
    return arrays.astype(x.reshape(-1), xp.float32)


def _shaped(part: Array, like: Array) -> Array:
    """A part of the vector as the leaf it came from."""
    shape = local(like).shape
    if _is_complex(like):
        pairs = part.reshape(*shape, 2)
        part = pairs[..., 0] + 1j * pairs[..., 1]
    result = arrays.astype(part.reshape(shape), like.dtype)
    return _sharded(result, like) if arrays.is_dtensor(like) else result


def _sharded(shard: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor like another one, of this process's shard."""
    result: torch.Tensor = type(like).from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return result
