"""Leaves cut into messages of bounded size.

How leaves are cut depends on their sizes alone: it must be the same on all replicas, and where a
leaf lies in memory need not be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

# Vector units and the kernels of accelerators want whole lines of so many values.
ALIGNMENT = 16


class Piece(NamedTuple):
    """A stretch of one leaf."""

    source: Tensor  # flat
    target: Tensor  # flat; may be the source
    finish: Callable[[], object] | None = None  # to be called when the target is written

    @property
    def donated(self) -> bool:
        return self.source.data_ptr() == self.target.data_ptr()


def whole(source: Tensor, target: Tensor) -> Piece:
    """The whole of a leaf; one without a flat view is copied, and written to in the end."""
    donated = source is target
    if source.is_complex():
        source, target = real(source), real(target)
    flat = source.contiguous().view(-1)
    if donated and source.is_contiguous():
        return Piece(flat, flat)
    if target.is_contiguous():
        return Piece(flat, target.view(-1))
    copy = flat if donated else torch.empty_like(flat)
    return Piece(flat, copy, partial(target.copy_, copy.view(target.shape)))


def real(x: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


def is_aligned(length: int) -> bool:
    """Whether leaves of that length leave those behind them aligned, in an arena and in a message.

    The others stand together at one end: a few biases do not cost all others their alignment.
    """
    return length % ALIGNMENT == 0


def cut(pieces: Iterable[Piece], lengths: Iterable[int]) -> Iterator[list[Piece]]:
    """Stretches of exactly so many values, one after the other; the last one may have fewer."""
    rooms = iter(lengths)
    message: list[Piece] = []
    room = 0
    for piece in pieces:
        start, length = 0, piece.source.numel()
        while start < length:
            room = room or next(rooms)
            end = min(start + room, length)
            message.append(piece if end - start == length else _part(piece, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield message
                message = []
    if message:
        yield message


def bundle(pieces: Iterable[Piece], capacity: int, large: int) -> Iterator[list[Piece]]:
    """Messages of at most so many values. Leaves are not cut unless they exceed that; large ones
    have messages of their own."""
    message: list[Piece] = []
    length = 0
    for piece in pieces:
        size = piece.source.numel()
        if message and (size >= large or length + size > capacity):
            yield message
            message, length = [], 0
        if size >= large:
            yield from cut([piece], itertools.repeat(capacity))
        elif size:
            message.append(piece)
            length += size
    if message:
        yield message


def in_one_piece(message: list[Piece], dtype: torch.dtype) -> Tensor | None:
    """The memory of the targets, if they are one stretch of it, of that dtype."""
    first = message[0].target
    if first.dtype != dtype:
        return None
    start = end = first.data_ptr()
    for piece in message:
        if piece.target.data_ptr() != end:
            return None
        end += piece.target.numel() * dtype.itemsize
    if len(message) == 1:
        return first
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(((end - start) // dtype.itemsize,), (1,))


def split(values: Tensor, pieces: list[Piece]) -> list[Tensor]:
    """The part of a message for each of its pieces."""
    return list(values.split([piece.target.numel() for piece in pieces]))


def finish(pieces: list[Piece]) -> None:
    """What remains to be done when all targets are written."""
    for piece in pieces:
        if piece.finish is not None:
            piece.finish()


def _part(piece: Piece, start: int, end: int) -> Piece:
    last = end == piece.source.numel()
    return Piece(piece.source[start:end], piece.target[start:end], piece.finish if last else None)
