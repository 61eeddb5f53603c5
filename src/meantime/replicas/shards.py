"""What this process holds of the leaves, and which leaves can be exchanged.

Of a DTensor it holds the local shard, and replicas exchange shards of the same place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from meantime import arrays
from meantime._foreach import plain
from meantime.codecs.layout import local


def check(
    leaves: Iterable[Tensor], group: dist.ProcessGroup, paths: Callable[[], list[str]]
) -> None:
    """Refuse what the processes of a group cannot exchange.

    Args:
        paths: the names of the leaves, for errors.

    Raises:
        TypeError: a leaf has no values, no strides, or is a term of a sum yet to be taken.
        ValueError: a leaf is sharded over processes of the group.
    """
    for i, x in enumerate(leaves):
        if plain(x) and x.layout is torch.strided and not x.is_meta:
            continue
        error = _unfit(x, group)
        if error is not None:
            raise type(error)(f"{paths()[i] or 'the leaf'} {error}")


def without_values(x: Tensor) -> str | None:
    """Why a tensor has no values, if it has none."""
    if is_lazy(x):
        return "has no values yet: run a batch through the model first"
    if x.is_meta:
        return "is on the meta device: materialise the model first (to_empty)"
    return None


def place(x: Tensor) -> str:
    """Which shard of a DTensor this process holds, in words that are the same on all replicas."""
    at = x.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    along = [at[dim] for dim in _sharded(x.placements)]  # type: ignore[attr-defined]
    return f"{list(local(x).shape)} of it at {along}" if along else "whole"


def _unfit(x: Any, group: dist.ProcessGroup) -> Exception | None:
    """Why a leaf cannot be exchanged."""
    if not isinstance(x, Tensor):
        return TypeError(f"is no torch tensor: {x!r}")
    if (lack := without_values(x)) is not None:
        return TypeError(lack)
    if x.layout is not torch.strided:
        return TypeError(f"has the layout {x.layout}: only strided tensors are exchanged")
    if arrays.is_dtensor(x):
        ranks = tuple(dist.get_process_group_ranks(group))
        return _misplaced(x.device_mesh, x.placements, ranks)  # type: ignore[attr-defined]
    return None


@functools.lru_cache
def _misplaced(mesh: Any, placements: Any, ranks: tuple[int, ...]) -> Exception | None:
    names = mesh.mesh_dim_names or range(mesh.ndim)
    for name, placement in zip(names, placements, strict=True):
        if placement.is_partial():
            return TypeError(
                f"is Partial over the mesh dimension {name!r}, a term of a sum that is not taken "
                "yet: redistribute it first"
            )
    for dim in _sharded(placements):
        along = dist.get_process_group_ranks(mesh.get_group(dim))
        if len(set(along) & set(ranks)) > 1:
            others = [name for i, name in enumerate(names) if placements[i].is_replicate()]
            use = " or ".join(f"Distributed(mesh[{name!r}])" for name in others)
            return ValueError(
                f"is sharded over the mesh dimension {names[dim]!r} (processes {along}), and the "
                f"processes {list(ranks)} would take its shards for replicas: pass the dimension "
                f"along which the replicas lie, {use or 'such as Distributed(mesh[...])'}"
            )
    return None


def _sharded(placements: Any) -> list[int]:
    return [dim for dim, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
