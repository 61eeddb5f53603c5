"""What is checked and made equal before the first step."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from meantime.codecs.layout import local
from meantime.replicas.agreement import compare_lines, describe
from meantime.replicas.base import Replicas
from meantime.transform import Transform


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot make the local steps of one replica."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            "ZeroRedundancyOptimizer lets every rank step a share of the parameters with that "
            "rank's gradients alone: replicas with gradients of their own would be mixed without "
            "notice. Use the plain optimizer, or shard inside a replica with fully_shard"
        )


def check_parameters(parameters: list[Tensor]) -> None:
    """Refuse parameters without values."""
    for i, parameter in enumerate(parameters):
        if is_lazy(parameter):
            raise TypeError(
                f"parameter {i} is not initialised: run a batch through the model first"
            )
        if parameter.is_meta:
            raise TypeError(
                f"parameter {i} is on the meta device: materialise the model (to_empty) first"
            )


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
        for tensor, value in zip(tensors, world.broadcast(tensors), strict=True):
            if value is not tensor:
                tensor.copy_(value)
    else:
        names = [line.split(":")[0] for line in describe([parameters, buffers])]
        digests = [f"{name} = {_digest(x)}" for name, x in zip(names, tensors, strict=True)]
        compare_lines(digests, world, device)


def _digest(x: Tensor) -> str:
    """A fingerprint of the values."""
    data = local(x).detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
