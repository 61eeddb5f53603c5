"""Means over processes in messages of bounded size: packing, reduction and unpacking overlap.

A message whose targets are one stretch of memory is reduced there; others go through a bucket.
Two buckets of each kind (device and accumulation dtype) are all the extra memory there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meantime._foreach import SMALL_LEAF
from meantime.replicas.memory import Memory
from meantime.replicas.overlap import overlapped
from meantime.replicas.pieces import Piece, bundle, finish, in_one_piece, is_aligned, split, whole

LARGE = 2**22
"""In bytes: a leaf of that size is not packed, and less than that is not worth a message."""

Leaf = tuple[Tensor, Tensor]  # source and target, which may be the source


class Buckets:
    """Reduces lists of tensors over a process group, with memory that it keeps.

    Args:
        size: the bound on a message, in bytes.
    """

    def __init__(self, size: int):
        self.size = size
        self.memory = Memory()

    def mean(self, leaves: list[Leaf], weight: float | None, group: dist.ProcessGroup) -> None:
        """Write the mean of the sources over the group into the targets.

        Floating and complex tensors are averaged, integers and bools take the maximum.
        """
        overlapped(self.messages(leaves, weight, group))

    def messages(
        self, leaves: list[Leaf], weight: float | None, group: dist.ProcessGroup
    ) -> Iterator[Iterator[None]]:
        """That mean, to be `overlapped` with other messages."""
        found: dict[tuple[torch.dtype, torch.device], list[Leaf]] = {}
        for leaf in leaves:
            x = leaf[0]
            found.setdefault((x.dtype, x.device), []).append(leaf)
        kinds: dict[tuple[torch.dtype, torch.device], list[Leaf]] = {}
        for (dtype, device), members in found.items():
            kinds.setdefault((_message_dtype(dtype), device), []).extend(members)
        for (dtype, device), members in kinds.items():
            if dtype.is_floating_point:
                yield from self._means(members, weight, dtype, device, group)
            else:
                for pieces in self._bundles(members, dtype):
                    yield _maximum(pieces, dtype, group)

    def _bundles(self, leaves: list[Leaf], dtype: torch.dtype) -> Iterator[list[Piece]]:
        capacity = max(1, self.size // dtype.itemsize)
        large = min(capacity, LARGE // dtype.itemsize)
        head: list[Leaf] = []
        body: list[Leaf] = []
        length = 0
        for leaf in leaves:
            size = leaf[0].numel()
            if is_aligned(size):
                body.append(leaf)
                length += size
            else:
                head.append(leaf)
        parts = [head, body] if length >= large else [[*head, *body]]
        for part in parts:
            yield from bundle((whole(*leaf) for leaf in part), capacity, large)

    def _means(
        self,
        leaves: list[Leaf],
        weight: float | None,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> Iterator[Iterator[None]]:
        total: float | None = None
        if weight is None:
            total = float(dist.get_world_size(group))
        else:
            # A one before all values: weighted and summed, it is the total weight.
            one = torch.ones(1, dtype=dtype, device=device)
            leaves = [(one, one), *leaves]

        def message(pieces: list[Piece]) -> Iterator[None]:
            nonlocal total
            values = self._pack(pieces, weight, dtype)
            work = dist.all_reduce(values, group=group, async_op=True)
            yield
            work.wait()
            if total is None:
                total = float(values[0])
            self._unpack(values, pieces, total)

        for pieces in self._bundles(leaves, dtype):
            yield message(pieces)

    def _pack(self, pieces: list[Piece], weight: float | None, dtype: torch.dtype) -> Tensor:
        # A replica of weight 0 must keep what it has until it knows that another one has not.
        values = None if weight == 0 else in_one_piece(pieces, dtype)
        if values is None:
            length = sum(piece.source.numel() for piece in pieces)
            values = self.memory.bucket(length, dtype, pieces[0].source.device)
            if weight == 0:  # multiplying would let a NaN through
                return values.zero_()
            sources = [piece.source for piece in pieces]
            if all(source.dtype == dtype for source in sources):
                torch.cat(sources, out=values)
            else:
                torch._foreach_copy_(split(values, pieces), sources)
        elif not pieces[0].donated:
            values.copy_(pieces[0].source)
        return values if weight is None or weight == 1 else values.mul_(weight)

    def _unpack(self, values: Tensor, pieces: list[Piece], total: float) -> None:
        if values.data_ptr() == pieces[0].target.data_ptr():
            values.div_(total)
        else:
            written = pieces
            parts = split(values, pieces)
            if total == 0:
                # Without any weight there is no mean, and what was donated stays.
                fresh = [not piece.donated for piece in pieces]
                written = list(itertools.compress(pieces, fresh))
                parts = list(itertools.compress(parts, fresh))
            targets = [piece.target for piece in written]
            if values.numel() >= SMALL_LEAF * len(pieces) and _all_in(targets, values.dtype):
                for part, target in zip(parts, targets, strict=True):
                    torch.div(part, total, out=target)
            elif targets:
                values.div_(total)
                torch._foreach_copy_(targets, parts)
            self.memory.give_back(values)
        finish(pieces)


def _maximum(pieces: list[Piece], dtype: torch.dtype, group: dist.ProcessGroup) -> Iterator[None]:
    values = torch.cat([piece.source.to(dtype) for piece in pieces])
    work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)
    yield
    work.wait()
    for piece, part in zip(pieces, split(values, pieces), strict=True):
        piece.target.copy_(part)
    finish(pieces)


def _all_in(tensors: list[Tensor], dtype: torch.dtype) -> bool:
    return all(x.dtype == dtype for x in tensors)


def _message_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values travel and are accumulated as."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return torch.uint8 if dtype == torch.bool else dtype
