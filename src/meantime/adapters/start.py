"""What is checked and made equal before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime.adapters.in_place import write
from meantime.codecs.layout import local
from meantime.keywords import CONTRACT, keywords
from meantime.replicas import Solo
from meantime.replicas.agreement import compare_lines, describe
from meantime.replicas.base import Levels, Replicas
from meantime.replicas.shards import without_values
from meantime.transform import Transform
from meantime.tree import vdot


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_parameters(parameters: list[Tensor]) -> None:
    """Refuse parameters without values."""
    for i, parameter in enumerate(parameters):
        if (lack := without_values(parameter)) is not None:
            raise TypeError(f"parameter {i} {lack}")


@torch.no_grad()
def check_direction(
    averager: Transform, parameters: list[Tensor | None], levels: Levels, optimizer: Optimizer
) -> None:
    """Refuse a transform that makes steps of gradients, by what it makes of ones."""
    if not averager.updates:
        return
    ones = [
        None if p is None else torch.ones((1,) * p.ndim, dtype=p.dtype, device=p.device)
        for p in parameters
    ]
    alone = {name: Solo() for name in levels} if isinstance(levels, Mapping) else Solo()
    try:
        updates, _ = averager.update(ones, averager.init(ones), ones, replicas=alone)
    except TypeError:
        named = keywords(averager.update)
        if named is not None and named <= CONTRACT | {"weight"}:
            raise
        return  # it may need arguments that only a step has
    if float(vdot(ones, updates).real) < 0:
        raise ValueError(
            f"{averager!r} turns gradients into steps, but here the steps are made by "
            f"{type(optimizer).__name__}: give the recipe identity() for its inner one"
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
        write(tensors, world.broadcast(tensors))
    else:
        names = [line.split(":")[0] for line in describe([parameters, buffers])]
        digests = [f"{name} = {_digest(x)}" for name, x in zip(names, tensors, strict=True)]
        compare_lines(digests, world, device)


def _digest(x: Tensor) -> str:
    """A fingerprint of the values."""
    data = local(x).detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
