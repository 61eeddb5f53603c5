"""Half precision."""

from __future__ import annotations

import math

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs.base import Codec, Message
from meantime.made import made

LARGEST_HALF = 65504.0
SMALLEST_NORMAL_HALF = 2.0**-14
STEP_OF_SUBNORMAL_HALVES = 2.0**-24


@made
def bf16() -> Codec:
    r"""Send bfloat16: :math:`|x - C(x)| \le 2^{-8} |x|`, over the range of float32.

    Two bytes a value, rounded to the nearest, ties to even.

    Example:
        >>> import torch, meantime as mt
        >>> mt.codecs.bf16().roundtrip(torch.tensor([1.001, 1000.0, 1e-30]))
        tensor([1.0000e+00, 1.0000e+03, 9.9840e-31])
    """
    return Codec(
        encode=lambda x: (to_bfloat16(x),),
        decode=lambda message, length: from_bfloat16(message[0]),
        nbytes=lambda length: 2 * length,
        dtype="bfloat16",
    )


@made
def fp16() -> Codec:
    r"""Send float16: :math:`|x - C(x)| \le 2^{-11} |x|` for :math:`2^{-14} \le |x| \le 65504`.

    Two bytes a value, rounded to the nearest, ties to even. Larger values saturate, smaller ones
    are rounded to multiples of :math:`2^{-24}`.

    Example:
        >>> import torch, meantime as mt
        >>> mt.codecs.fp16().roundtrip(torch.tensor([1.001, 1e6, 1e-30]))
        tensor([1.0010e+00, 6.5504e+04, 0.0000e+00])
    """

    def encode(x: Array) -> Message:
        xp = arrays.namespace(x)
        if not isinstance(x, torch.Tensor) or torch.compiler.is_compiling():
            step = STEP_OF_SUBNORMAL_HALVES
            small = xp.round(x * (1 / step)) * step
            x = xp.where(abs(x) < SMALLEST_NORMAL_HALF, small, _rounded(x, 10))
        return (arrays.astype(xp.clip(x, -LARGEST_HALF, LARGEST_HALF), xp.float16),)

    def decode(message: Message, length: int) -> Array:
        return arrays.astype(message[0], arrays.namespace(*message).float32)

    return Codec(encode, decode, nbytes=lambda length: 2 * length, dtype="float16")


# Compilers may drop a cast to half precision that is cast back. Where they are at work, float16 is
# cast from numbers that integer arithmetic has rounded already, and bfloat16 is bits in integers,
# which is also all that NumPy knows of it.


def to_bfloat16(x: Array) -> Array:
    """float32 rounded to bfloat16, as bits."""
    if isinstance(x, torch.Tensor):
        return x.to(torch.bfloat16).view(torch.int16)
    xp = arrays.namespace(x)
    return arrays.astype(_rounded(x, 7).view(xp.int32) >> 16, xp.int16)


def from_bfloat16(bits: Array) -> Array:
    """What `to_bfloat16` made, in float32."""
    if isinstance(bits, torch.Tensor) and not torch.compiler.is_compiling():
        return bits.view(torch.bfloat16).to(torch.float32)
    xp = arrays.namespace(bits)
    return (arrays.astype(bits, xp.int32) << 16).view(xp.float32)


def _rounded(x: Array, mantissa: int) -> Array:
    """float32 rounded to so many bits of mantissa, to the nearest, ties to even."""
    xp = arrays.namespace(x)
    dropped = 23 - mantissa
    bits = x.view(xp.int32)
    bits = bits + (2 ** (dropped - 1) - 1) + ((bits >> dropped) & 1)
    # The bits of a NaN could overflow to those of a number.
    nan = xp.full_like(x, math.nan)
    return xp.where(xp.isnan(x), nan, ((bits >> dropped) << dropped).view(xp.float32))
