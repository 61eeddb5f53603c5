"""Few of the values."""

from __future__ import annotations

import math

import torch

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs.base import Codec, Message, check_block
from meantime.made import made


@made
def topk(fraction: float, block: int = 4096) -> Codec:
    r"""Send the largest values of every block, exactly, and take the others for zero.

    .. math::
        C(x)_i = x_i \text{ if } |x_i| \text{ is one of the } \lceil f B \rceil
        \text{ largest of its block of } B \text{ values, else } 0

    Six bytes for each value sent: a float32, and its place in the block as an int16. Of equal
    values the first is sent. A last block that is shorter sends its share. What is not sent is
    lost: put `error_feedback` before the mean.

    Args:
        fraction: the part :math:`f` of the values that is sent, in (0, 1].
        block: the length :math:`B` of a block, at most 32768.

    Raises:
        ValueError: `fraction` or `block` is out of range.

    Aji & Heafield 2017 (https://arxiv.org/abs/1704.05021); by blocks in Sarfi et al. 2025
    (https://arxiv.org/abs/2508.15706).

    Example:
        >>> import torch, meantime as mt
        >>> mt.codecs.topk(0.25).roundtrip(torch.tensor([0.1, -3.0, 0.2, 1.0]))
        tensor([ 0., -3.,  0.,  0.])
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction!r}")
    check_block(block, largest=2**15)

    def kept(length: int) -> int:
        return math.ceil(fraction * length)

    def encode(x: Array) -> Message:
        xp = arrays.namespace(x)
        whole = x.shape[0] // block * block
        places = [
            _largest(rows, kept(rows.shape[1])).reshape(-1)
            for rows in (x[:whole].reshape(-1, block), x[whole:].reshape(1, -1))
        ]
        places = xp.concatenate(places)
        values = x[_positions(places, x.shape[0])]
        return values, arrays.astype(places, xp.int16)

    def decode(message: Message, length: int) -> Array:
        values, places = message
        return _scattered(values, _positions(places, length), length)

    def nbytes(length: int) -> int:
        return 6 * (length // block * kept(block) + kept(length % block))

    def _positions(places: Array, length: int) -> Array:
        """Where the values that are at these places of their blocks are in the vector."""
        xp = arrays.namespace(places)
        places = arrays.astype(places, xp.int64 if xp is torch else xp.int32)
        whole = length // block
        # Not `rank // kept(block)`, whose last values the inductor of torch 2.13 makes up.
        rows = places[: whole * kept(block)].reshape(whole, kept(block))
        starts = block * (xp.cumsum(xp.ones_like(rows[:, :1]), 0) - 1)
        last = places[whole * kept(block) :] + whole * block
        return xp.concatenate([(rows + starts).reshape(-1), last])

    return Codec(encode, decode, nbytes, block, sparse=True)


def _largest(rows: Array, count: int) -> Array:
    """The places of the largest values of each row; of equal ones the first."""
    if isinstance(rows, torch.Tensor):
        # `topk` leaves the order among equals open, and sorting takes long. The bits of positive
        # numbers are ordered as they are; with the place below them, all are different.
        places = torch.arange(rows.shape[1], device=rows.device)
        keys = (rows.abs().view(torch.int32).long() << 16) - places
        return keys.topk(count, dim=1).indices
    return arrays.namespace(rows).argsort(-abs(rows), stable=True)[:, :count]


def _scattered(values: Array, positions: Array, length: int) -> Array:
    """The values at their positions in a vector of zeros."""
    if isinstance(values, torch.Tensor):
        return values.new_zeros(length).scatter(0, positions, values)
    zeros = arrays.namespace(values).zeros(length, values.dtype)
    if hasattr(zeros, "at"):
        return zeros.at[positions].set(values)
    zeros[positions] = values
    return zeros
