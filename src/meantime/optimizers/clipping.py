"""Bound updates by value or by norm."""

from __future__ import annotations

from typing import Any

from meantime import arrays
from meantime.arrays import Array
from meantime.transform import EmptyState, Transform
from meantime.tree import Tree, global_norm, leafwise


@leafwise
def _clamp(updates: Array, bound: Array) -> Array:
    return arrays.minimum(arrays.maximum(updates, -bound), bound)


@leafwise
def _shrink(updates: Array, norm: Array, bound: Array) -> Array:
    # Two factors, as dividing first keeps half precision away from overflow.
    return arrays.where(norm > bound, updates / norm * bound, updates)


def clip(max_value: float | Array) -> Transform:
    r"""Bound every element: :math:`u \leftarrow \min(\max(u, -c), c)`.

    Raises:
        ValueError: `max_value` is not positive.

    Example:
        >>> import torch
        >>> tx = clip(1.0)
        >>> tx.update(torch.tensor([-3.0, 0.5]), tx.init(torch.zeros(2)))[0]
        tensor([-1.0000,  0.5000])
    """
    _check_positive("max_value", max_value)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return _clamp(updates, max_value), state

    return Transform(lambda params: EmptyState(), update)


def clip_by_global_norm(max_norm: float | Array) -> Transform:
    r"""Bound the norm over all leaves: :math:`u \leftarrow u \min(1, c / \lVert u \rVert_2)`.

    Updates within the bound pass bit for bit. The norm is taken at least in float32.

    Pascanu, Mikolov & Bengio 2013 (https://arxiv.org/abs/1211.5063), algorithm 1.

    Raises:
        ValueError: `max_norm` is not positive.

    Example:
        >>> import torch
        >>> tx = clip_by_global_norm(1.0)
        >>> tx.update(torch.tensor([3.0, 4.0]), tx.init(torch.zeros(2)))[0]
        tensor([0.6000, 0.8000])
    """
    _check_positive("max_norm", max_norm)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return _shrink(updates, global_norm(updates), max_norm), state

    return Transform(lambda params: EmptyState(), update)


def _check_positive(name: str, value: Any) -> None:
    if not arrays.is_array(value) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
