"""Matrices of low rank instead of updates.

Not a codec of one vector: a message needs the shape of a matrix, a second one that answers the mean
of the first, and what the last ones have found. So it is a member of an update chain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.control import counter, select
from meantime.made import made
from meantime.replicas.base import Levels, resolve
from meantime.transform import Transform
from meantime.tree import Tree, all_finite, flatten, paths, zeros_like

MASK = 2**32 - 1


class PowerSGDState(NamedTuple):
    """How many messages of this replica were not finite (0-d int32); and for each leaf that is
    sent as a matrix of low rank, in their order, the right factor, of shape (columns, rank) and the
    same on all replicas, and what this replica's messages have lost so far."""

    rejected: Array
    factors: tuple[Array, ...]
    residuals: tuple[Array, ...]


@made
def powersgd(rank: int, over: str | None = None, seed: int = 0) -> Transform:
    r"""Replace the updates by the mean over the replicas of approximations of low rank.

    Takes the place of `mean()` in an update chain. Each leaf is a matrix, of its first axis by all
    others. With the factor :math:`Q` and the residual :math:`E_k` of the last call:

    .. math::
        M_k &= U_k + E_k \\
        P &= \operatorname{orthonormal}\Big(\sum_k w_k M_k Q \Big/ \sum_k w_k\Big) \\
        Q_k &= M_k^\top P, \qquad Q \leftarrow \sum_k w_k Q_k \Big/ \sum_k w_k \\
        U_k &\leftarrow P Q^\top, \qquad E_k \leftarrow M_k - P Q_k^\top

    One step of a power iteration a call: a mean of rank :math:`r` arrives as it is, and of updates
    that change slowly the best approximation of that rank. Nothing is lost, only late: the mean
    residual and the sum of all that arrived are the sum of all mean updates.

    An :math:`m \times n` matrix takes :math:`r (m + n)` values in two messages. Leaves for which
    that is not less, vectors, complex numbers and integers are averaged as they are, in the first
    of them. A replica whose updates are not all finite takes no part, as in `mean`.

    Args:
        rank: :math:`r`.
        over: the level of a hierarchy, where `replicas` is a mapping.
        seed: of the first :math:`Q`, which is a function of it and of the place of the leaf.

    `update` takes `weight`, this replica's weight.

    Raises:
        ValueError: `rank` is not a positive integer.
        TypeError: a leaf is a DTensor; `update` is called without `replicas`, or they have no level
            `over`.

    Vogels et al. 2019 (https://arxiv.org/abs/1905.13727), algorithms 1 and 2.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.codecs.powersgd(1)
        >>> u = torch.outer(torch.arange(4.0), torch.ones(4))
        >>> updates, state = tx.update(u, tx.init(u), replicas=mt.Solo())
        >>> torch.allclose(updates, u, atol=1e-6)
        True
        >>> world = mt.Recorded(mt.Solo())
        >>> _ = tx.update(u, state, replicas=world)
        >>> world.bytes  # two vectors of four values, and a weight
        36
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive integer, got {rank!r}")

    def init(params: Tree) -> PowerSGDState:
        leaves = flatten(params)[0]
        for x, path in zip(leaves, paths(params), strict=True):
            if arrays.is_dtensor(x):
                raise TypeError(
                    f"powersgd needs whole matrices, but {path or 'the leaf'} is a DTensor: use "
                    "mean(codec=...)"
                )
        low = [(i, x) for i, x in enumerate(leaves) if _pays(x, rank)]
        return PowerSGDState(
            counter(params, local=True),
            tuple(_first_factor(x, rank, seed, i) for i, x in low),
            tuple(zeros_like(x, wide=True) for _, x in low),
        )

    def update(
        updates: Tree,
        state: PowerSGDState,
        params: Tree = None,
        *,
        replicas: Levels | None = None,
        weight: Array | None = None,
    ) -> tuple[Tree, PowerSGDState]:
        world = resolve(replicas, over, "powersgd")
        leaves, spec = flatten(updates)
        if not leaves:
            return updates, state
        finite = all_finite(updates)
        weight = arrays.where(finite, 1.0 if weight is None else weight * 1.0, 0.0)
        low = [i for i, x in enumerate(leaves) if _pays(x, rank)]
        rest = [i for i in range(len(leaves)) if i not in low]
        matrices = [_matrix(e + leaves[i]) for i, e in zip(low, state.residuals, strict=True)]
        images = [m @ q for m, q in zip(matrices, state.factors, strict=True)]
        present, images, others = world.mean(
            (weight, images, [leaves[i] for i in rest]), weight=weight
        )
        frames = [arrays.namespace(p).linalg.qr(p)[0] for p in images]
        answers = [m.T @ p for m, p in zip(matrices, frames, strict=True)]
        factors = tuple(world.mean(answers, weight=weight)) if answers else ()

        mean = dict(zip(rest, others, strict=True))
        residuals = []
        for i, m, p, answer, factor in zip(low, matrices, frames, answers, factors, strict=True):
            x = leaves[i]
            mean[i] = arrays.astype((p @ factor.T).reshape(x.shape), x.dtype)
            residuals.append((m - p @ answer.T).reshape(x.shape))
        arrived = spec.unflatten([mean[i] for i in range(len(leaves))])
        kept = select(finite, lambda: tuple(residuals), lambda: state.residuals)
        arrived, factors, kept = select(
            present > 0,
            lambda: (arrived, factors, kept),
            lambda: (zeros_like(updates), state.factors, state.residuals),
        )
        return arrived, PowerSGDState(state.rejected + ~finite, factors, kept)

    return Transform(init, update)


def _pays(x: Array, rank: int) -> bool:
    """Whether factors are smaller than the matrix, which is real."""
    if len(x.shape) < 2 or not arrays.is_inexact(x) or x.dtype != x.real.dtype:
        return False
    rows, columns = x.shape[0], math.prod(x.shape[1:])
    return rank * (rows + columns) < rows * columns


def _matrix(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _first_factor(x: Array, rank: int, seed: int, place: int) -> Array:
    """Numbers in (-1/2, 1/2) which depend on nothing else, the same in every world.

    The hash is lowbias32 of https://github.com/skeeto/hash-prospector.
    """
    columns = math.prod(x.shape[1:])
    start = 0x9E3779B9 * (seed + 0x85EBCA6B * (place + 1)) & MASK
    bits = (torch.arange(columns * rank) + start) & MASK
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & MASK
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & MASK
    bits = bits ^ bits >> 16
    uniform = ((bits + 0.5) / 2**32 - 0.5).reshape(columns, rank)
    dtype = arrays.wide_dtype(x)
    if isinstance(x, torch.Tensor):
        return uniform.to(x.device, dtype)
    return arrays.namespace(x).asarray(uniform.numpy(), dtype=dtype)
