"""Means over processes in buckets: packing, reduction and unpacking overlap.

Leaves are cut into messages of a bounded size, in their order, one sequence of messages for each
(device, accumulation dtype). Two messages are under way at a time: while one is reduced, the
next is packed and the one before is unpacked. A message that is all of one leaf, or a part of
it, is reduced in the memory of the result; others go through a bucket. Two buckets of each kind
are kept for the next mean, and are all the extra memory there is.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meantime import arrays
from meantime.replicas.pieces import Piece, copy_back, cut, split, whole


class _Flight(NamedTuple):
    """A message that is being reduced."""

    work: Any
    values: Tensor
    pieces: list[Piece]


class Buckets:
    """Reduces lists of tensors over a process group, with memory that it keeps.

    Args:
        size: the bound on a message, in bytes.
    """

    def __init__(self, size: int):
        self.size = size
        self._spare: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def mean(
        self, sources: list[Tensor], targets: list[Tensor], weight: Any, group: dist.ProcessGroup
    ) -> None:
        """Write the mean of the sources over the group into the targets (maybe the sources).

        Floating and complex tensors are averaged, integers and bools take the maximum.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, x in enumerate(sources):
            kinds.setdefault((_message_dtype(x), x.device), []).append(i)
        for (dtype, _), members in kinds.items():
            pieces = [whole(sources[i], targets[i]) for i in members]
            if dtype.is_floating_point:
                self._mean(pieces, None if weight is None else float(weight), dtype, group)
            else:
                self._maximum(pieces, dtype, group)
            for i, piece in zip(members, pieces, strict=True):
                copy_back(piece.target, targets[i])

    def _mean(
        self, pieces: list[Piece], weight: float | None, dtype: torch.dtype, group: Any
    ) -> None:
        divisor = float(dist.get_world_size(group))
        if weight is not None:
            # A one before all values: weighted and summed, it is the total weight.
            one = torch.ones(1, dtype=dtype, device=pieces[0].source.device)
            pieces = [Piece(one, one), *pieces]
        flights: list[_Flight] = []
        first = weight is not None

        def land() -> None:
            nonlocal divisor, first
            flight = flights.pop(0)
            flight.work.wait()
            if first:
                divisor, first = float(flight.values[0]), False
            self._unpack(flight, divisor)

        for message in cut(pieces, self._capacity(dtype)):
            values = self._pack(message, weight, dtype)
            work = dist.all_reduce(values, group=group, async_op=True)
            flights.append(_Flight(work, values, message))
            if len(flights) == 2:
                land()
        while flights:
            land()

    def _pack(self, message: list[Piece], weight: float | None, dtype: torch.dtype) -> Tensor:
        target = message[0].target
        # A replica of weight 0 must keep what it has until it knows that another one has not.
        if len(message) == 1 and target.dtype == dtype and weight != 0:
            values = target.copy_(message[0].source)
        else:
            values = self._take(message, dtype)
            torch._foreach_copy_(split(values, message), [piece.source for piece in message])
        if weight == 0:  # multiplying would let a NaN through
            return values.zero_()
        return values if weight is None or weight == 1 else values.mul_(weight)

    def _unpack(self, flight: _Flight, divisor: float) -> None:
        values, pieces = flight.values.div_(divisor), flight.pieces
        if values.data_ptr() == pieces[0].target.data_ptr():
            return
        parts = split(values, pieces)
        if divisor == 0:
            # Without any weight there is no mean, and what was donated stays.
            kept = [piece.donated for piece in pieces]
            pieces = list(itertools.compress(pieces, map(operator.not_, kept)))
            parts = list(itertools.compress(parts, map(operator.not_, kept)))
        if pieces:
            torch._foreach_copy_([piece.target for piece in pieces], parts)
        self._give_back(values)

    def _maximum(self, pieces: list[Piece], dtype: torch.dtype, group: Any) -> None:
        for message in cut(pieces, self._capacity(dtype)):
            values = torch.cat([piece.source.to(dtype) for piece in message])
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
            for piece, part in zip(message, split(values, message), strict=True):
                piece.target.copy_(part)

    def _capacity(self, dtype: torch.dtype) -> int:
        return max(1, self.size // dtype.itemsize)

    def _take(self, message: list[Piece], dtype: torch.dtype) -> Tensor:
        """A bucket that holds the message."""
        length = sum(piece.source.numel() for piece in message)
        device = message[0].source.device
        spare = self._spare.setdefault((device, dtype), [])
        for i, bucket in enumerate(spare):
            if bucket.numel() >= length:
                return spare.pop(i)[:length]
        return torch.empty(length, dtype=dtype, device=device)

    def _give_back(self, values: Tensor) -> None:
        bucket = values if values._base is None else values._base
        spare = self._spare[values.device, values.dtype]
        spare.append(bucket)
        spare.sort(key=torch.numel)
        del spare[:-2]


def _message_dtype(x: Tensor) -> torch.dtype:
    """What the values travel and are accumulated as."""
    if x.is_complex():
        return x.dtype.to_real()
    if x.is_floating_point():
        dtype: torch.dtype = arrays.wide_dtype(x)
        return dtype
    return torch.uint8 if x.dtype == torch.bool else x.dtype
