"""Memory for messages that is kept for the next ones: pages new from the system are slow."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 2
"""Buckets of each kind (device and dtype)."""


class Memory:
    """Buckets and scratch memory."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    def bucket(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A vector without values."""
        spare = self._buckets.setdefault((device, dtype), [])
        for i, bucket in enumerate(spare):
            if bucket.numel() >= length:
                return spare.pop(i)[:length]
        return torch.empty(length, dtype=dtype, device=device)

    def give_back(self, values: Tensor) -> None:
        """Keep a bucket for others."""
        bucket = values if values._base is None else values._base
        spare = self._buckets[values.device, values.dtype]
        spare.append(bucket)
        spare.sort(key=torch.numel)
        del spare[:-KEPT]

    def scratch(self, nbytes: int, count: int, device: torch.device) -> list[Tensor]:
        """So many buffers of bytes. They are those that others were given: ask for them once."""
        nbytes = _aligned(nbytes)
        memory = self._scratch.get(device)
        if memory is None or memory.numel() < nbytes * count:
            memory = torch.empty(nbytes * count, dtype=torch.uint8, device=device)
            self._scratch[device] = memory
        return list(memory[: nbytes * count].view(count, nbytes))


class Stack:
    """Tensors without values, one after the other in a buffer while there is room."""

    def __init__(self, buffer: Tensor):
        self._buffer = buffer
        self._used = 0

    def clear(self) -> None:
        """Begin again: what it gave is not read any more."""
        self._used = 0

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        start, end = self._used, self._used + length * dtype.itemsize
        if end > self._buffer.numel():
            return torch.empty(length, dtype=dtype, device=self._buffer.device)
        self._used = _aligned(end)
        return self._buffer[start:end].view(dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
