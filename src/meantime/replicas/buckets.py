"""Means over processes in buckets: pack, reduce and unpack overlap.

Leaves are cut into messages of a fixed size, in their order, one sequence of messages for each
(device, accumulation dtype). Two messages are under way at a time: while one is reduced, the
next is packed and the one before is unpacked. Two buffers are all the extra memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meantime import arrays


class _Piece(NamedTuple):
    source: Tensor  # flat
    target: Tensor  # flat


def reduce_in_buckets(
    sources: list[Tensor],
    targets: list[Tensor],
    weight: Any,
    group: dist.ProcessGroup,
    bucket_bytes: int,
) -> None:
    """Write the mean of the sources over the group into the targets (which may be the sources).

    Floating and complex tensors are averaged, integers and bools take the maximum.
    """
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for i, x in enumerate(sources):
        inexact = arrays.is_inexact(x)
        dtype = _accumulator(x) if inexact else (torch.uint8 if x.dtype == torch.bool else x.dtype)
        kinds.setdefault((x.device, dtype, inexact), []).append(i)
    for (_, dtype, inexact), members in kinds.items():
        staged = [(_flat(sources[i]), *_writable(targets[i])) for i in members]
        pieces = [_Piece(source, flat) for source, flat, _ in staged]
        size = max(1, bucket_bytes // dtype.itemsize)
        if inexact:
            _mean(pieces, None if weight is None else float(weight), dtype, size, group)
        else:
            _maximum(pieces, dtype, size, group)
        for (_, flat, copy_back), i in zip(staged, members, strict=True):
            if copy_back:
                targets[i].copy_(_as(flat, targets[i]))


def _mean(
    pieces: list[_Piece], weight: float | None, dtype: torch.dtype, size: int, group: Any
) -> None:
    total = None
    if weight is None:
        divisor = float(dist.get_world_size(group))
    else:
        # A one before all values: weighted and summed, it is the total weight.
        total = torch.ones(1, dtype=dtype, device=pieces[0].source.device)
        pieces = [_Piece(total, total), *pieces]
    flight: list[tuple[Any, Tensor, list[_Piece]]] = []
    spare: list[Tensor] = []

    def land() -> None:
        nonlocal divisor, total
        work, buffer, message = flight.pop(0)
        work.wait()
        if total is not None:
            divisor, total = float(buffer[0]), None
        offset = 0
        for piece in message:
            end = offset + piece.source.numel()
            if divisor != 0 or piece.source.data_ptr() != piece.target.data_ptr():
                piece.target.copy_(buffer[offset:end].div_(divisor))
            offset = end
        spare.append(buffer)

    for message in _messages(pieces, size):
        buffer = spare.pop() if spare else _buffer(pieces, size, dtype)
        work = dist.all_reduce(_pack(message, buffer, weight), group=group, async_op=True)
        flight.append((work, buffer, message))
        if len(flight) == 2:
            land()
    while flight:
        land()


def _buffer(pieces: list[_Piece], size: int, dtype: torch.dtype) -> Tensor:
    needed = sum(p.source.numel() for p in pieces)
    return torch.empty(min(size, needed), dtype=dtype, device=pieces[0].source.device)


def _pack(message: list[_Piece], buffer: Tensor, weight: float | None) -> Tensor:
    offset = 0
    for piece in message:
        end = offset + piece.source.numel()
        buffer[offset:end].copy_(piece.source)
        offset = end
    values = buffer[:offset]
    if weight == 0:  # multiplying would let a NaN through
        return values.zero_()
    return values if weight is None or weight == 1 else values.mul_(weight)


def _maximum(pieces: list[_Piece], dtype: torch.dtype, size: int, group: Any) -> None:
    for message in _messages(pieces, size):
        buffer = torch.cat([p.source.to(dtype) for p in message])
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
        lengths = [p.source.numel() for p in message]
        for piece, values in zip(message, buffer.split(lengths), strict=True):
            piece.target.copy_(values)


def _messages(pieces: list[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Cut the pieces into messages of at most `size` elements."""
    message: list[_Piece] = []
    room = size
    for source, target in pieces:
        start = 0
        while start < source.numel():
            end = min(start + room, source.numel())
            whole = end - start == source.numel()
            message.append(
                _Piece(source, target) if whole else _Piece(source[start:end], target[start:end])
            )
            room -= end - start
            start = end
            if room == 0:
                yield message
                message, room = [], size
    if message:
        yield message


def _accumulator(x: Tensor) -> torch.dtype:
    return x.dtype.to_real() if x.is_complex() else arrays.wide_dtype(x)


def _flat(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1)


def _writable(x: Tensor) -> tuple[Tensor, bool]:
    """A flat tensor to write results to, and whether they must be copied back from it."""
    real = torch.view_as_real(x) if x.is_complex() else x
    if real.is_contiguous():
        return real.view(-1), False
    return torch.empty(real.numel(), dtype=real.dtype, device=real.device), True


def _as(flat: Tensor, x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(flat.view(*x.shape, 2))
    return flat.view(x.shape)
