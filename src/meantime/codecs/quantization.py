"""Small integers with one scale a block."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs.base import Codec, Message, check_block, padded
from meantime.codecs.casting import from_bfloat16, to_bfloat16
from meantime.made import made


@made
def int8(block: int = 256) -> Codec:
    r"""Send 8-bit integers and a scale for every block of values.

    .. math::
        s = \mathrm{bf16}\!\left(\max_{i \in \mathrm{block}} |x_i| / 127\right), \quad
        C(x)_i = s \,\mathrm{round}(x_i / s), \quad |x_i - C(x)_i| \le s / 2

    The scale is a bfloat16, so that the products are exact and alike everywhere.

    Args:
        block: how many values share a scale.

    Raises:
        ValueError: `block` is not a positive integer.

    Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861), with linear levels.

    Example:
        >>> import meantime as mt
        >>> tx = mt.outer(mt.chain(mt.mean(codec=mt.codecs.int8()), mt.sgd(1.0)))
        >>> mt.codecs.int8().nbytes(1024)
        1032
    """
    check_block(block)
    return _blockwise(127, block, _as_int8, lambda values, length: values, lambda length: length)


@made
def int4(block: int = 64) -> Codec:
    r"""Send 4-bit integers, two in a byte, and a scale for every block of values.

    .. math::
        s = \mathrm{bf16}\!\left(\max_{i \in \mathrm{block}} |x_i| / 7\right), \quad
        C(x)_i = s \,\mathrm{round}(x_i / s), \quad |x_i - C(x)_i| \le s / 2

    Small values of a block are lost: put `error_feedback` before the mean.

    Args:
        block: how many values share a scale; even.

    Raises:
        ValueError: `block` is not a positive even integer.

    Messages of four bits in DiLoCo: Douillard et al. 2025 (https://arxiv.org/abs/2501.18512),
    with other levels.

    Example:
        >>> import torch, meantime as mt
        >>> mt.codecs.int4().roundtrip(torch.tensor([7.0, -3.2, 0.4]))
        tensor([ 7., -3.,  0.])
        >>> mt.codecs.int4().nbytes(1024)
        544
    """
    check_block(block, multiple=2)
    return _blockwise(7, block, _pack, _unpack, lambda length: (length + 1) // 2)


def _blockwise(
    levels: int,
    block: int,
    pack: Callable[[Array], Array],
    unpack: Callable[[Array, int], Array],
    packed_bytes: Callable[[int], int],
) -> Codec:
    """Whole multiples, up to `levels`, of a scale for every block."""

    def encode(x: Array) -> Message:
        xp = arrays.namespace(x)
        rows = padded(x, block).reshape(-1, block)
        # A product, as compilers replace the division by a constant with one.
        scale = to_bfloat16(xp.amax(xp.abs(rows), 1) * (1 / levels))
        divisor = from_bfloat16(scale)
        divisor = xp.where(divisor > 0, divisor, xp.ones_like(divisor))
        # A subnormal scale may be rounded by more than half a level.
        multiples = _rounded(rows / divisor[:, None], levels)
        return pack(multiples.reshape(-1)[: x.shape[0]]), scale

    def decode(message: Message, length: int) -> Array:
        values, scale = message
        xp = arrays.namespace(values)
        rows = padded(arrays.astype(unpack(values, length), xp.float32), block).reshape(-1, block)
        rows = _scaled(rows, from_bfloat16(scale)[:, None])
        return rows.reshape(-1)[:length]

    def nbytes(length: int) -> int:
        return packed_bytes(length) + 2 * -(-length // block)

    return Codec(encode, decode, nbytes, block)


# On torch in the memory of what was just made: each pass over new memory takes as long as two.


def _rounded(x: Array, levels: int) -> Array:
    if isinstance(x, torch.Tensor):
        return x.round_().clamp(-levels, levels)
    xp = arrays.namespace(x)
    return xp.clip(xp.round(x), -levels, levels)


def _scaled(x: Array, scale: Array) -> Array:
    return x.mul_(scale) if isinstance(x, torch.Tensor) else x * scale


def _as_int8(multiples: Array) -> Array:
    return arrays.astype(multiples, arrays.namespace(multiples).int8)


def _pack(multiples: Array) -> Array:
    """Two numbers from -8 to 7 in each byte, each plus 8, the first in its lower half."""
    pairs = padded(multiples, 2).reshape(-1, 2)
    return arrays.astype(pairs[:, 0] + 16 * pairs[:, 1] + 136, arrays.namespace(pairs).uint8)


def _unpack(values: Array, length: int) -> Array:
    xp = arrays.namespace(values)
    pairs = xp.stack([values & 15, values >> 4], -1)
    return arrays.astype(pairs.reshape(-1)[:length], xp.int8) - 8
