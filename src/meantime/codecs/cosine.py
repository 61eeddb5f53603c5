"""Frequencies instead of values."""

from __future__ import annotations

import math
from typing import Any

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs.base import Codec, Message, check_block, check_codec
from meantime.made import made


@made
def dct(codec: Codec, length: int = 64) -> Codec:
    r"""Compress the discrete cosine transform of the values instead of the values.

    .. math::
        C(x) = D^\top C'(D x), \qquad
        D_{kj} = \sqrt{\tfrac{2 - \delta_{k0}}{n}} \cos\frac{\pi (2j + 1) k}{2n}

    on every :math:`n` consecutive values, where :math:`D` is orthonormal. Of a slowly changing
    signal few frequencies hold most: `dct(topk(1 / 128))` sends the 32 largest of each 64 times 64,
    in six bytes each.

    :math:`C(C(x)) = C(x)` up to roundings.

    Args:
        codec: what compresses the frequencies.
        length: :math:`n`, at most 256; the last, fewer values have a transform of their own.

    Raises:
        TypeError: `codec` is no codec.
        ValueError: `length` is out of range.

    The codec of DeMo: Peng et al. 2024 (https://arxiv.org/abs/2411.19870), section 3, which
    transforms matrices along both axes.

    Example:
        >>> import torch, meantime as mt
        >>> codec, x = mt.codecs.dct(mt.codecs.topk(1 / 64)), torch.full((64,), 0.3)
        >>> codec.nbytes(64)  # a constant is one frequency
        6
        >>> torch.allclose(codec.roundtrip(x), x)
        True
    """
    check_codec(codec, "dct")
    check_block(length, largest=256)

    def encode(x: Array) -> Message:
        return codec.encode(_transformed(x, length))

    def decode(message: Message, size: int) -> Array:
        return _transformed(codec.decode(message, size), length, inverse=True)

    block = math.lcm(codec.block, length)
    return Codec(encode, decode, codec.nbytes, block, codec.sparse)


def _transformed(x: Array, length: int, inverse: bool = False) -> Array:
    """The transforms of so many values at a time, one after the other."""
    whole = x.shape[0] // length * length
    parts = [_rotated(x[:whole].reshape(-1, length), inverse)]
    if whole < x.shape[0]:
        parts.append(_rotated(x[whole:].reshape(1, -1), inverse))
    return arrays.namespace(x).concatenate([part.reshape(-1) for part in parts])


def _rotated(rows: Array, inverse: bool) -> Array:
    """Every row times the transposed matrix of the transform, or times the matrix.

    In whole numbers, with all sums below 2**53: whoever sums them in whatever order, on whatever
    machine, gets the same, and with it what is decoded is the same on all replicas. (A JAX without
    float64 rounds them, as any other product.)
    """
    xp = arrays.namespace(rows)
    exact = torch.float64 if xp is torch else xp.asarray(1.0).dtype
    largest = xp.amax(xp.abs(rows), 1)[:, None]
    power = (largest.view(xp.int32) & 0x7F800000).view(xp.float32)  # of two, at most the largest
    unit = arrays.astype(xp.where(power > 0, power, xp.ones_like(power)), exact) * 2.0**-23
    numbers = xp.round(arrays.astype(rows, exact) / unit)
    matrix = _matrix(rows.shape[1], rows, exact)
    matrix = matrix if inverse else matrix.T
    if xp is torch or xp.__name__ == "numpy":
        product = numbers @ matrix
    else:
        product = xp.matmul(numbers, matrix, precision="highest")
    return arrays.astype(product * (unit * 2.0**-24), xp.float32)


def _matrix(length: int, like: Array, dtype: Any) -> Array:
    """The matrix of the transform, of shape (frequency, place), in units of 2**-24."""
    frequencies, places = torch.arange(length)[:, None], torch.arange(length)
    turns = (2 * places + 1) * frequencies % (4 * length)  # of a circle in so many parts
    matrix = torch.cos(turns.double() * (math.pi / (2 * length))) * math.sqrt(2 / length)
    matrix = torch.where(frequencies == 0, math.sqrt(1 / length), matrix).mul(2**24).round()
    if isinstance(like, torch.Tensor):
        return matrix.to(like.device)
    return arrays.namespace(like).asarray(matrix.numpy(), dtype=dtype)
