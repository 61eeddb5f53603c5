"""Bound updates by value or by norm."""

from __future__ import annotations

from meantime import arrays
from meantime.arrays import Array
from meantime.made import made
from meantime.optimizers.scaling import with_hyperparameter
from meantime.schedules import Hyperparameter, check, is_zero
from meantime.transform import Transform
from meantime.tree import Tree, global_norm, leafwise


@leafwise
def _clamp(updates: Array, bound: Array) -> Array:
    return arrays.minimum(arrays.maximum(updates, -bound), bound)


@leafwise
def _shrink(updates: Array, norm: Array, bound: Array) -> Array:
    # Two factors, as dividing first keeps half precision away from overflow.
    return arrays.where(norm > bound, updates / norm * bound, updates)


@made
def clip(max_value: Hyperparameter) -> Transform:
    r"""Bound every element: :math:`u \leftarrow \min(\max(u, -c), c)`.

    Args:
        max_value: :math:`c`, a number or a schedule of the number of updates.

    Raises:
        ValueError: `max_value` is not positive.

    Example:
        >>> import torch
        >>> tx = clip(1.0)
        >>> tx.update(torch.tensor([-3.0, 0.5]), tx.init(torch.zeros(2)))[0]
        tensor([-1.0000,  0.5000])
    """
    _check_positive("max_value", max_value)
    return with_hyperparameter(_clamp, max_value)


@made
def clip_by_global_norm(max_norm: Hyperparameter) -> Transform:
    r"""Bound the norm over all leaves: :math:`u \leftarrow u \min(1, c / \lVert u \rVert_2)`.

    Updates within the bound pass bit for bit. The norm is taken at least in float32.

    Args:
        max_norm: :math:`c`, a number or a schedule of the number of updates.

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

    def shrink(updates: Tree, bound: Array) -> Tree:
        return _shrink(updates, global_norm(updates), bound)

    return with_hyperparameter(shrink, max_norm)


def _check_positive(name: str, value: Hyperparameter) -> None:
    check(name, value, 0)
    if is_zero(value):
        raise ValueError(f"{name} must be positive, got {value!r}")
