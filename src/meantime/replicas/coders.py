"""Codecs at work on stretches of leaves, on so many values at a time as fit into the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meantime.codecs import Codec
from meantime.codecs.base import Message
from meantime.codecs.casting import LARGEST_HALF
from meantime.replicas.memory import Stack
from meantime.replicas.messages import weighted_mean
from meantime.replicas.pieces import Piece, cut, finish, split

CACHED = 2**17
"""Values at a time, on a CPU; an accelerator takes all it can get."""


class Coder(Protocol):
    """How the messages of one stretch are made, in memory of a stack, and read."""

    def pack(self, stretch: list[Piece], length: int, stack: Stack) -> Message:
        """The message of a stretch of so many values."""
        ...

    def mean(self, rows: list[Message], weights: list[float], length: int, stack: Stack) -> Message:
        """The message of the mean of messages, each of so many values."""
        ...

    def unpack(self, rows: list[Message], length: int, stretch: list[Piece]) -> None:
        """Write messages, each of so many values, one after the other to the targets."""
        ...


class Casts:
    """Of a codec that casts: values are cast straight into and from a message."""

    def __init__(self, codec: Codec, device: torch.device):
        self._dtype: torch.dtype = getattr(torch, codec.dtype or "")
        self._step = _step(codec, device)

    def pack(self, stretch: list[Piece], length: int, stack: Stack) -> Message:
        message = stack.empty(length, self._dtype)
        # Messages are made of float32.
        sources = [x.float() if x.dtype == torch.float64 else x for x, *_ in stretch]
        torch._foreach_copy_(split(message, stretch), sources)
        return (self._saturated(message),)

    def mean(self, rows: list[Message], weights: list[float], length: int, stack: Stack) -> Message:
        message = stack.empty(length, self._dtype)
        total, term = message.new_empty((2, min(self._step, length)), dtype=torch.float32)
        columns = zip(*(row.split(self._step) for (row,) in rows), strict=True)
        for part, column in zip(message.split(self._step), columns, strict=True):
            sums, terms = total[: len(part)], term[: len(part)]
            into = sums
            for x, weight in zip(column, weights, strict=True):
                if weight > 0:
                    into.copy_(x)
                    if weight != 1:
                        into.mul_(weight)
                    if into is terms:
                        sums.add_(terms)
                    into = terms
            part.copy_(sums.div_(sum(weights)))
        return (self._saturated(message),)

    def unpack(self, rows: list[Message], length: int, stretch: list[Piece]) -> None:
        for pieces, (row,) in zip(cut(stretch, itertools.repeat(length)), rows, strict=True):
            torch._foreach_copy_([piece.target for piece in pieces], split(row, pieces))
        finish(stretch)

    def _saturated(self, x: Tensor) -> Tensor:
        return x.clamp_(-LARGEST_HALF, LARGEST_HALF) if x.dtype == torch.float16 else x


class Blocks:
    """Of any codec."""

    def __init__(self, codec: Codec, device: torch.device):
        self._codec = codec
        self._step = _step(codec, device)
        self._lengths: list[int] = []  # of the arrays for so many values

    def pack(self, stretch: list[Piece], length: int, stack: Stack) -> Message:
        parts = cut(stretch, itertools.repeat(self._step))
        vectors = (_joined([piece.source.to(torch.float32) for piece in part]) for part in parts)
        return self._encode(vectors, length, stack)

    def mean(self, rows: list[Message], weights: list[float], length: int, stack: Stack) -> Message:
        return self._encode(self._means(rows, weights, length), length, stack)

    def unpack(self, rows: list[Message], length: int, stretch: list[Piece]) -> None:
        vectors = itertools.chain(*(self._decode(row, length) for row in rows))
        self._write(vectors, self._steps(length) * len(rows), stretch)

    def unpack_mean(
        self, rows: list[Message], weights: list[float], length: int, stretch: list[Piece]
    ) -> None:
        """Write the mean of messages, as it is, to the targets."""
        self._write(self._means(rows, weights, length), self._steps(length), stretch)

    def _encode(self, vectors: Iterable[Tensor], length: int, stack: Stack) -> Message:
        """The message of vectors one after the other, of so many values together."""
        whole: list[Tensor] = []
        ends: list[int] = []
        for x in vectors:
            message = self._codec.encode(x)
            if not whole:
                self._lengths = self._lengths or [part.numel() for part in message]
                count = len(self._steps(length))
                whole = [stack.empty(count * part.numel(), part.dtype) for part in message]
                ends = [0] * len(message)
            for i, part in enumerate(message):
                whole[i][ends[i] : ends[i] + part.numel()].copy_(part)
                ends[i] += part.numel()
        return tuple(x[:end] for x, end in zip(whole, ends, strict=True))

    def _decode(self, message: Message, length: int) -> Iterator[Tensor]:
        """These vectors."""
        parts = (x.split(n) for x, n in zip(message, self._lengths, strict=True))
        for part, step in zip(zip(*parts, strict=True), self._steps(length), strict=True):
            yield self._codec.decode(part, step)

    def _means(self, rows: list[Message], weights: list[float], length: int) -> Iterator[Tensor]:
        arrived = zip(*(self._decode(row, length) for row in rows), strict=True)
        return (weighted_mean(vectors, weights) for vectors in arrived)

    def _steps(self, length: int) -> list[int]:
        """The lengths of the vectors."""
        return [min(self._step, length - start) for start in range(0, length, self._step)]

    def _write(self, vectors: Iterable[Tensor], lengths: list[int], stretch: list[Piece]) -> None:
        for pieces, x in zip(cut(stretch, lengths), vectors, strict=True):
            torch._foreach_copy_([piece.target for piece in pieces], split(x, pieces))
        finish(stretch)


def _step(codec: Codec, device: torch.device) -> int:
    """How many values are encoded or decoded at a time: of whole blocks."""
    values = CACHED if device.type == "cpu" else 2**30
    return max(1, values // codec.block) * codec.block


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
