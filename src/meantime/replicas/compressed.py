"""Means of compressed messages over processes, for a stretch of bounded size after the other."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meantime import arrays
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.replicas.buckets import Buckets
from meantime.replicas.messages import mean_of_vectors
from meantime.replicas.pieces import copy_back, cut, split, whole


def compressed_mean(
    sources: list[Tensor],
    targets: list[Tensor],
    weight: Array | None,
    group: dist.ProcessGroup,
    codec: Codec,
    buckets: Buckets,
) -> None:
    """Write the mean of the sources over the group into the targets (maybe the sources).

    What is neither floating nor complex is not compressed.
    """
    exact = [i for i, x in enumerate(sources) if not arrays.is_inexact(x)]
    buckets.mean([sources[i] for i in exact], [targets[i] for i in exact], weight, group)
    devices: dict[torch.device, list[int]] = {}
    for i, x in enumerate(sources):
        if arrays.is_inexact(x):
            devices.setdefault(x.device, []).append(i)
    size = dist.get_world_size(group)
    gather, exchange = partial(_gathered, group=group), partial(_exchanged, group=group)
    # Of whole blocks for every process: stretches do not show in the result, and are not padded.
    smallest = size * codec.block
    capacity = max(1, buckets.size // (torch.float32.itemsize * smallest)) * smallest
    for device, members in devices.items():
        pieces = [whole(sources[i], targets[i]) for i in members]
        weights = [1.0] * size
        if weight is not None:
            mine = torch.tensor([float(weight)], dtype=torch.float32, device=device)
            weights = gather(mine).flatten().tolist()
        if sum(weights) > 0:
            for stretch in cut(pieces, capacity):
                x = torch.cat([source.to(torch.float32) for source, _ in stretch])
                mean = mean_of_vectors(x, weights, codec, size, gather, exchange)
                for (_, target), part in zip(stretch, split(mean, stretch), strict=True):
                    target.copy_(part)
        else:  # there is no mean, and what was donated stays
            for piece in pieces:
                if not piece.donated:
                    piece.target.fill_(math.nan)
        for i, piece in zip(members, pieces, strict=True):
            copy_back(piece.target, targets[i])


# Messages travel as bytes: not every backend knows all dtypes.


def _exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row k goes to rank k; the rows that come from all ranks."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8), group=group)
    return received


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, one in each row."""
    everyone = x.new_empty(dist.get_world_size(group), x.numel())
    dist.all_gather(list(everyone.view(torch.uint8)), x.view(torch.uint8), group=group)
    return everyone
