"""Messages from every process of a group to every other one, as bytes: not every backend knows all
dtypes, and the collectives of gloo copy what these need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meantime.codecs.base import Message
from meantime.replicas.memory import Stack


def exchange(
    message: Message, stack: Stack, group: dist.ProcessGroup
) -> tuple[list[Message], list[Any]]:
    """Send the k-th part of a message to process k.

    Args:
        stack: memory for what comes.

    Returns:
        What comes from each process, in the order of ranks, and what to `wait` for first.
    """
    size = dist.get_world_size(group)
    parts = list(zip(*(x.view(size, -1) for x in message), strict=True))
    return _sent(parts.__getitem__, stack, group)


def send_all(
    message: Message, stack: Stack, group: dist.ProcessGroup
) -> tuple[list[Message], list[Any]]:
    """Send a message to all processes; returns what `exchange` does."""
    return _sent(lambda k: message, stack, group)


def wait(requests: list[Any]) -> None:
    for request in requests:
        request.wait()


def _sent(
    message_to: Callable[[int], Message], stack: Stack, group: dist.ProcessGroup
) -> tuple[list[Message], list[Any]]:
    ranks = dist.get_process_group_ranks(group)
    size, me = len(ranks), dist.get_rank(group)
    received = [message_to(me)] * size
    sends, receives = [], []
    for step in range(1, size):
        to, source = (me + step) % size, (me - step) % size
        received[source] = tuple(stack.empty(x.numel(), x.dtype) for x in message_to(me))
        for mine, theirs in zip(message_to(to), received[source], strict=True):
            receives.append(dist.P2POp(dist.irecv, _bytes(theirs), ranks[source], group))
            sends.append(dist.P2POp(dist.isend, _bytes(mine), ranks[to], group))
    operations = [*receives, *sends]
    return received, dist.batch_isend_irecv(operations) if operations else []


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
