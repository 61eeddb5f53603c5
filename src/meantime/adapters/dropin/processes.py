"""The processes that torch's classes name by a group."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from meantime.replicas import Distributed, Solo


def members(group: Any) -> Distributed | Solo:
    """The processes of a group, the default one if None; a process outside of it is alone."""
    if group is None:
        return Distributed()
    if dist.get_rank(group) < 0:
        return Solo()
    return Distributed(None if group is dist.group.WORLD else group)


def same_node() -> Distributed:
    """The processes of this node, as torchrun counts them; all processes without torchrun."""
    world = Distributed()
    return world.groups(int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
