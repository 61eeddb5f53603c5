"""Means of compressed messages over processes, in stretches of bounded size.

A process receives a part of each stretch from all others, and sends the mean of that part back to
them. Stretches overlap, and what is encoded and decoded at a time stays in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from meantime.arrays import is_inexact
from meantime.codecs import Codec
from meantime.replicas.buckets import Buckets, Leaf
from meantime.replicas.coders import Blocks, Casts, Coder
from meantime.replicas.memory import Stack
from meantime.replicas.overlap import overlapped
from meantime.replicas.peers import exchange, send_all, wait
from meantime.replicas.pieces import Piece, cut, finish, real, whole


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
    exact = [leaf for leaf in leaves if not is_inexact(leaf[0])]
    devices: dict[torch.device, list[Leaf]] = {}
    for leaf in leaves:
        if is_inexact(leaf[0]):
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
    length = sum(real(source).numel() for source, _ in leaves)
    count = min(buckets.size // (torch.float32.itemsize * blocks), -(-length // blocks))
    capacity = max(1, count) * blocks
    # Three stretches are under way, each with what it sends and what it receives.
    room = codec.nbytes(capacity) + 256 * len(weights)
    scratch = itertools.cycle(buckets.memory.scratch(room, 6, device))
    for stretch in cut((whole(*leaf) for leaf in leaves), itertools.repeat(capacity)):
        stacks = Stack(next(scratch)), Stack(next(scratch))
        if codec.sparse:
            yield _sparse_mean(stretch, weights, Blocks(codec, device), stacks, group)
        else:
            coder = (Blocks if codec.dtype is None else Casts)(codec, device)
            yield _mean(stretch, weights, coder, codec.block, stacks, group)


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
    stretch: list[Piece],
    weights: list[float],
    coder: Coder,
    block: int,
    stacks: tuple[Stack, Stack],
    group: dist.ProcessGroup,
) -> Iterator[None]:
    size = len(weights)
    length = sum(piece.source.numel() for piece in stretch)
    missing = -length % (size * block)
    if missing:
        zeros = stretch[0].source.new_zeros(missing)
        stretch = [*stretch, Piece(zeros, zeros)]
    part = (length + missing) // size
    ours, theirs = stacks
    message = coder.pack(stretch, size * part, ours)
    rows, requests = exchange(message, theirs, group)
    yield
    wait(requests)
    if not any(weights):
        return _write_nothing(stretch)
    mean = coder.mean(rows, weights, part, theirs)
    ours.clear()
    rows, requests = send_all(mean, ours, group)
    yield
    wait(requests)
    coder.unpack(rows, part, stretch)


def _sparse_mean(
    stretch: list[Piece],
    weights: list[float],
    coder: Blocks,
    stacks: tuple[Stack, Stack],
    group: dist.ProcessGroup,
) -> Iterator[None]:
    """The messages of all go to all: the mean of a part would not be sparse."""
    length = sum(piece.source.numel() for piece in stretch)
    ours, theirs = stacks
    rows, requests = send_all(coder.pack(stretch, length, ours), theirs, group)
    yield
    wait(requests)
    if not any(weights):
        return _write_nothing(stretch)
    coder.unpack_mean(rows, weights, length, stretch)


def _write_nothing(stretch: list[Piece]) -> None:
    """There is no mean, and what was donated stays."""
    for piece in stretch:
        if not piece.donated:
            piece.target.fill_(math.nan)
    finish(stretch)
