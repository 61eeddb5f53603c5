"""Means of compressed messages over processes, in stretches of bounded size.

A process receives a part of each stretch from all others, and sends the mean of that part back to
them. Stretches overlap, and what is encoded and decoded at a time stays in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meantime.codecs import Codec
from meantime.codecs.base import Message
from meantime.replicas.buckets import Buckets, Leaf
from meantime.replicas.memory import Stack
from meantime.replicas.messages import weighted_mean
from meantime.replicas.overlap import overlapped
from meantime.replicas.peers import exchange, send_all, wait
from meantime.replicas.pieces import Piece, cut, finish, split, whole

CACHED = 2**17
"""The number of values that are encoded or decoded at a time."""

PARTS = 4
"""A stretch is this part of a bucket: three of them are under way at a time."""


def compressed_mean(
    leaves: list[Leaf],
    weight: float | None,
    group: dist.ProcessGroup,
    codec: Codec,
    buckets: Buckets,
) -> None:
    """Write the mean of the sources over the group into the targets.

    What is neither floating nor complex is not compressed.
    """
    exact = [leaf for leaf in leaves if not _is_inexact(leaf[0])]
    devices: dict[torch.device, list[Leaf]] = {}
    for leaf in leaves:
        if _is_inexact(leaf[0]):
            devices.setdefault(leaf[0].device, []).append(leaf)
    weights = [1.0] * dist.get_world_size(group)
    messages = [buckets.messages(exact, None, group)]
    if weight is not None and devices:
        messages.insert(0, iter([_share(weight, weights, next(iter(devices)), group)]))
    for device, members in devices.items():
        messages.append(_stretches(members, weights, codec, group, buckets, device))
    overlapped(itertools.chain(*messages))


def _stretches(
    leaves: list[Leaf],
    weights: list[float],
    codec: Codec,
    group: dist.ProcessGroup,
    buckets: Buckets,
    device: torch.device,
) -> Iterator[Iterator[None]]:
    # Of whole blocks for every process: stretches do not show in the result.
    blocks = codec.block if codec.sparse else codec.block * len(weights)
    capacity = max(1, buckets.size // PARTS // (torch.float32.itemsize * blocks)) * blocks
    # Three stretches are under way, each with what it sends, receives, sends and receives.
    nbytes = 3 * codec.nbytes(capacity) + 4096
    scratch = itertools.cycle(buckets.memory.scratch(nbytes, 3, device))
    mean = _sparse_mean if codec.sparse else _mean
    for stretch in cut((whole(*leaf) for leaf in leaves), itertools.repeat(capacity)):
        yield mean(stretch, weights, _Coder(codec, Stack(next(scratch))), group)


def _share(
    weight: float, weights: list[float], device: torch.device, group: dist.ProcessGroup
) -> Iterator[None]:
    """Let all processes know the weights of all."""
    mine = torch.tensor([weight], dtype=torch.float32, device=device)
    rows, requests = send_all((mine,), Stack(mine[:0]), group)
    yield
    wait(requests)
    weights[:] = [float(row) for (row,) in rows]


def _mean(
    stretch: list[Piece], weights: list[float], coder: _Coder, group: dist.ProcessGroup
) -> Iterator[None]:
    size = len(weights)
    length = sum(piece.source.numel() for piece in stretch)
    missing = -length % (size * coder.block)
    if missing:
        zeros = stretch[0].source.new_zeros(missing)
        stretch = [*stretch, Piece(zeros, zeros)]
        length += missing
    message = coder.encode(_vectors(stretch, coder.step), length)
    rows, requests = exchange(message, coder.stack, group)
    yield
    wait(requests)
    if not any(weights):
        return _write_nothing(stretch)
    part = length // size
    arrived = zip(*(coder.decode(row, part) for row in rows), strict=True)
    mean = coder.encode((weighted_mean(vectors, weights) for vectors in arrived), part)
    rows, requests = send_all(mean, coder.stack, group)
    yield
    wait(requests)
    vectors = itertools.chain(*(coder.decode(row, part) for row in rows))
    _write(vectors, coder.steps(part) * size, stretch)


def _sparse_mean(
    stretch: list[Piece], weights: list[float], coder: _Coder, group: dist.ProcessGroup
) -> Iterator[None]:
    """The messages of all go to all: the mean of a part would not be sparse."""
    length = sum(piece.source.numel() for piece in stretch)
    message = coder.encode(_vectors(stretch, coder.step), length)
    rows, requests = send_all(message, coder.stack, group)
    yield
    wait(requests)
    if not any(weights):
        return _write_nothing(stretch)
    arrived = zip(*(coder.decode(row, length) for row in rows), strict=True)
    means = (weighted_mean(vectors, weights) for vectors in arrived)
    _write(means, coder.steps(length), stretch)


class _Coder:
    """A codec, applied to vectors in pieces that fit into the cache."""

    def __init__(self, codec: Codec, stack: Stack):
        self.codec, self.block, self.stack = codec, codec.block, stack
        self.step = max(1, CACHED // codec.block) * codec.block
        self.lengths: list[int] = []  # of the arrays for `step` values

    def encode(self, vectors: Iterable[Tensor], length: int) -> Message:
        """The message of vectors one after the other, all but the last of `step` values."""
        whole: list[Tensor] = []
        ends: list[int] = []
        for x in vectors:
            message = self.codec.encode(x)
            if not whole:
                self.lengths = self.lengths or [part.numel() for part in message]
                if x.numel() == length:
                    return message
                count = len(self.steps(length))
                whole = [self.stack.empty(count * part.numel(), part.dtype) for part in message]
                ends = [0] * len(message)
            for i, part in enumerate(message):
                whole[i][ends[i] : ends[i] + part.numel()].copy_(part)
                ends[i] += part.numel()
        return tuple(x[:end] for x, end in zip(whole, ends, strict=True))

    def decode(self, message: Message, length: int) -> Iterator[Tensor]:
        """These vectors, of `length` values together."""
        for i, step in enumerate(self.steps(length)):
            part = tuple(
                x[i * n : (i + 1) * n] for x, n in zip(message, self.lengths, strict=True)
            )
            yield self.codec.decode(part, step)

    def steps(self, length: int) -> list[int]:
        """The lengths of these vectors."""
        return [min(self.step, length - start) for start in range(0, length, self.step)]


def _vectors(stretch: list[Piece], step: int) -> Iterator[Tensor]:
    """The values of a stretch, so many at a time."""
    for pieces in cut(stretch, itertools.repeat(step)):
        yield _joined([piece.source.to(torch.float32) for piece in pieces])


def _write(vectors: Iterable[Tensor], lengths: list[int], stretch: list[Piece]) -> None:
    """Write vectors of these lengths, one after the other, to the targets."""
    for pieces, x in zip(cut(stretch, lengths), vectors, strict=True):
        torch._foreach_copy_([piece.target for piece in pieces], split(x, pieces))
    finish(stretch)


def _write_nothing(stretch: list[Piece]) -> None:
    """There is no mean, and what was donated stays."""
    for piece in stretch:
        if not piece.donated:
            piece.target.fill_(math.nan)
    finish(stretch)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
