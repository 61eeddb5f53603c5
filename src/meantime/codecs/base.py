"""What a codec is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.made import Made

Message = tuple[Array, ...]


class _Functions(NamedTuple):
    encode: Callable[[Array], Message]
    decode: Callable[[Message, int], Array]
    nbytes: Callable[[int], int]
    block: int = 1
    sparse: bool = False
    dtype: str | None = None


class Codec(Made, _Functions):
    r"""Pure functions that compress a flat float32 vector; :math:`C` = decode :math:`\circ` encode.

    They run on torch tensors, JAX and NumPy arrays, under `vmap`, `torch.compile` and `jax.jit`.
    For every codec :math:`C(0) = 0` and :math:`C(C(x)) = C(x)`, up to roundings where it is a
    `dct`; the mean of one replica counts on it.

    Args:
        encode: `(x) -> message`, a tuple of flat arrays.
        decode: `(message, length) -> x`, float32 of shape `(length,)`.
        nbytes: `(length) -> int`, the size of the message of a vector.
        block: vectors are encoded in blocks of so many values. The message of two vectors one
            after the other, the first of whole blocks, is made of their messages one after the
            other, array by array.
        sparse: whether a message holds only few of the values. The mean of such messages holds
            more of them, and is not encoded again.
        dtype: the name of a floating dtype of two bytes, if a message is the bits of the values
            in it; they saturate if that is float16. Where nothing is compiled, values are then
            cast straight into the message.

    Example:
        >>> import torch, meantime as mt
        >>> codec = mt.codecs.int8(block=4)
        >>> codec.roundtrip(torch.tensor([1.27, 0.5, -0.013, 0.0, 300.0]))
        tensor([ 1.2712e+00,  5.0049e-01, -1.0010e-02,  0.0000e+00,  2.9964e+02])
        >>> codec.nbytes(5)  # five values, two scales
        9
    """

    def roundtrip(self, x: Array) -> Array:
        """What arrives of a vector: :math:`C(x)`."""
        return self.decode(self.encode(x), x.shape[0])


def check_codec(codec: Any, who: str) -> None:
    """Refuse what is no codec."""
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{who} needs a codec, such as meantime.codecs.int8(), got {codec!r}"
            + (": call it first?" if callable(codec) else "")
        )


def check_block(block: Any, multiple: int = 1, largest: int | None = None) -> None:
    """Refuse what is no length of a block."""
    fits = isinstance(block, int) and block >= 1 and block % multiple == 0
    if not fits or (largest is not None and block > largest):
        kind = "positive" if multiple == 1 else "positive even"
        bound = "" if largest is None else f" of at most {largest}"
        raise ValueError(f"block must be a {kind} integer{bound}, got {block!r}")


def padded(x: Array, multiple: int) -> Array:
    """The vector with zeros behind it, up to a multiple of a length."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    if isinstance(x, torch.Tensor):
        return torch.nn.functional.pad(x, (0, missing))
    return arrays.namespace(x).pad(x, (0, missing))
