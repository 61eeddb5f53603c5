"""Groups of processes that objects can hold and still be copied and pickled."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from meantime.replicas import Distributed, Solo
from meantime.replicas.base import check_groups


class Processes(Distributed):
    """Processes by their group or by their ranks.

    A copy shares the group. What is unpickled makes it anew from the ranks, at its first use,
    which is collective over those ranks.
    """

    def __init__(self, group: Any = None, *, ranks: list[int] | None = None):
        super().__init__(group)
        self._ranks = ranks

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None and self._ranks is not None:
            self._group = dist.new_group(self._ranks, use_local_synchronization=True)
        return super().group

    def __deepcopy__(self, memo: Any) -> Processes:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        ranks = self._ranks
        if ranks is None and self._group is not None:
            ranks = dist.get_process_group_ranks(self.group)
        return _from_ranks, (ranks,)


def members(group: Any) -> Processes | Solo:
    """The processes of a group, the default one if None; a process outside of it is alone."""
    if group is None:
        return Processes()
    if dist.get_rank(group) < 0:
        return Solo()
    return Processes(None if group is dist.group.WORLD else group)


def consecutive(world: Processes, size: int) -> Processes:
    """This process's group of `size` consecutive ones."""
    check_groups(world.size, size)
    if size == world.size:
        return world
    start = world.rank // size * size
    return Processes(ranks=dist.get_process_group_ranks(world.group)[start : start + size])


def same_node() -> Processes:
    """The processes of this node, as torchrun counts them; all processes without torchrun."""
    world = Processes()
    return consecutive(world, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def _from_ranks(ranks: list[int] | None) -> Processes:
    return Processes(ranks=ranks)
