"""Leaves cut into stretches, so that messages have a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A stretch of one leaf."""

    source: Tensor  # flat
    target: Tensor  # flat; may be the source

    @property
    def donated(self) -> bool:
        return self.source.data_ptr() == self.target.data_ptr()


def whole(source: Tensor, target: Tensor) -> Piece:
    """The whole of a leaf, flat; a target that has no flat view is written to afterwards."""
    flat = _real(source).contiguous().view(-1)
    if source is target:  # donated; of a leaf that is not contiguous the copy stands for both
        return Piece(flat, flat)
    real = _real(target)
    return Piece(flat, real.view(-1) if real.is_contiguous() else torch.empty_like(flat))


def copy_back(flat: Tensor, x: Tensor) -> None:
    """Write the target of `whole` to the leaf it stands for."""
    if flat.data_ptr() != x.data_ptr():
        _real(x).copy_(flat.view(_real(x).shape))


def cut(pieces: list[Piece], capacity: int) -> Iterator[list[Piece]]:
    """Cut pieces into messages of so many values; the last one may have fewer."""
    message: list[Piece] = []
    room = capacity
    for source, target in pieces:
        start = 0
        while start < source.numel():
            end = min(start + room, source.numel())
            uncut = end - start == source.numel()
            message.append(
                Piece(source, target) if uncut else Piece(source[start:end], target[start:end])
            )
            room -= end - start
            start = end
            if room == 0:
                yield message
                message, room = [], capacity
    if message:
        yield message


def split(values: Tensor, pieces: list[Piece]) -> list[Tensor]:
    """The part of a message for each of its pieces."""
    return list(values.split([piece.target.numel() for piece in pieces]))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
