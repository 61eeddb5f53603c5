"""What is checked and made equal before the first step."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meantime.adapters.in_place import write
from meantime.codecs.layout import local
from meantime.replicas.agreement import compare_lines, describe
from meantime.replicas.base import Replicas
from meantime.replicas.shards import without_values
from meantime.transform import Transform


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_parameters(parameters: list[Tensor]) -> None:
    """Refuse parameters without values."""
    for i, parameter in enumerate(parameters):
        if (lack := without_values(parameter)) is not None:
            raise TypeError(f"parameter {i} {lack}")


@torch.no_grad()
def equal_start(
    averager: Transform,
    parameters: list[Tensor],
    buffers: list[Tensor],
    world: Replicas,
    how: str,
) -> None:
    """See to it that all replicas start from the same values, with the same averager."""
    tensors = [*parameters, *buffers]
    device = tensors[0].device
    compare_lines([repr(averager), *describe([parameters, buffers])], world, device)
    if how == "broadcast":
        write(tensors, world.broadcast(tensors))
    else:
        names = [line.split(":")[0] for line in describe([parameters, buffers])]
        digests = [f"{name} = {_digest(x)}" for name, x in zip(names, tensors, strict=True)]
        compare_lines(digests, world, device)


def _digest(x: Tensor) -> str:
    """A fingerprint of the values."""
    data = local(x).detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
