"""Replicas that are processes of a `torch.distributed` job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.codecs.layout import local
from meantime.replicas.agreement import compare_lines, describe
from meantime.replicas.base import check_groups, check_permutation, rotation
from meantime.replicas.buckets import Buckets
from meantime.replicas.compressed import compressed_mean
from meantime.replicas.shards import check, place
from meantime.tree import Tree


class Distributed:
    """The processes of a `torch.distributed` group (gloo, NCCL, ...).

    Messages are bucketed: a mean costs a few large collectives, whatever the number of leaves,
    and the extra memory is two buckets (with a codec three), whatever the size of the model.
    Donated leaves that are one stretch of memory, as those of `meantime.adapters.arena`, are
    reduced where they are.

    DTensor leaves take part with their local shards, so the group must be one over which they are
    replicated: replicas of a mesh that is sharded over `"shard"`, say with `fully_shard`, are
    `Distributed(mesh["replicate"])`. A replica some shard of which is not finite is left out by
    all its processes.

    Args:
        group: a process group, or a one-dimensional `DeviceMesh` (such as
            `mesh["replicate"]`); the default group if None. It is looked up at the first use,
            so a `Distributed()` may be made before `init_process_group`.
        bucket_bytes: the size of a message.

    A copy has the same group. What is unpickled makes its group again, together with the other
    processes of it.

    The first collective compares a fingerprint of its tree on all processes: replicas with
    different parameters raise `ValueError` on every rank, where the first difference is named,
    instead of hanging. Results carry no gradient.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this process is not in the group.

    Example:
        >>> import meantime as mt
        >>> mt.Distributed()
        Distributed()
    """

    def __init__(self, group: Any = None, *, bucket_bytes: int = 25 * 2**20):
        self._group = group
        self._buckets = Buckets(bucket_bytes)
        self._agreed = False

    def __repr__(self) -> str:
        return "Distributed()" if self._group is None else f"Distributed({self._group!r})"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        if not dist.is_initialized():
            raise RuntimeError(
                f"{self!r} needs a running job: start the script with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        group = self._group
        if hasattr(group, "get_group"):
            group = group.get_group()
        group = dist.group.WORLD if group is None else group
        if group is None or dist.get_rank(group) < 0:
            raise RuntimeError(f"process {dist.get_rank()} is not a member of {self!r}")
        return group

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def groups(self, size: int) -> Distributed:
        """This process's group of `size` consecutive ranks. Collective over that group."""
        check_groups(self.size, size)
        if size == self.size:
            return self
        start = self.rank // size * size
        ranks = dist.get_process_group_ranks(self.group)[start : start + size]
        return _of_ranks(ranks, self._buckets.size)

    def __deepcopy__(self, memo: Any) -> Distributed:
        return Distributed(self._group, bucket_bytes=self._buckets.size)

    def __reduce__(self) -> Any:
        # A group is known by its ranks: another process, or a later one, makes it again.
        ranks = None if self._group is None else dist.get_process_group_ranks(self.group)
        return _of_ranks, (ranks, self._buckets.size)

    @torch.no_grad()
    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        leaves, spec = self._open(tree)
        results = leaves
        if donate:
            pairs = [(x, x) for x in _once(map(local, leaves))]
        else:
            distinct = {id(x): (x, torch.empty_like(x)) for x in leaves}  # tied leaves stay tied
            results = [distinct[id(x)][1] for x in leaves]
            pairs = [(local(x), local(mean)) for x, mean in distinct.values()]
        factor = None if weight is None else float(weight)
        if codec is None:
            self._buckets.mean(pairs, factor, self.group)
        else:
            compressed_mean(pairs, factor, self.group, codec, self._buckets)
        return spec.unflatten(results)

    @torch.no_grad()
    def gather(self, tree: Tree) -> Tree:
        leaves, spec = self._open(tree)
        message = _pack(leaves)
        everyone = message.new_empty(self.size, message.numel())
        dist.all_gather(list(everyone), message, group=self.group)
        rows = [_unpack(row, leaves) for row in everyone]
        return spec.unflatten([torch.stack(column) for column in zip(*rows, strict=True)])

    @torch.no_grad()
    def permute(self, tree: Tree, sources: Sequence[int]) -> Tree:
        places = check_permutation(sources, self.size)
        leaves, spec = self._open(tree)
        rank = self.rank
        if places[rank] == rank:
            return tree
        message = _pack(leaves)
        received = torch.empty_like(message)
        ranks = dist.get_process_group_ranks(self.group)
        to, source = ranks[places.index(rank)], ranks[places[rank]]
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, message, to, self.group),
                dist.P2POp(dist.irecv, received, source, self.group),
            ]
        )
        for request in requests:
            request.wait()
        return spec.unflatten(_unpack(received, leaves))

    def shift(self, tree: Tree, by: int) -> Tree:
        return self.permute(tree, rotation(by, self.size))

    @torch.no_grad()
    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        leaves, spec = self._open(tree)
        message = _pack(leaves)
        dist.broadcast(message, group=self.group, group_src=root)
        return spec.unflatten(_unpack(message, leaves))

    def _open(self, values: Tree) -> tuple[list[Tensor], Any]:
        """The leaves of what is about to be exchanged, and its structure."""
        leaves, spec = tree.flatten(values)
        check(leaves, self.group, lambda: tree.paths(values))
        if not self._agreed:
            self._agreed = True  # the comparison itself is made of collectives
            try:
                self._agree(leaves, values)
            except ValueError:
                self._agreed = False
                raise
        return leaves, spec

    def _agree(self, leaves: list[Tensor], values: Tree) -> None:
        """Compare on all processes what is about to be exchanged."""
        lines = describe(values)
        first: dict[int, int] = {}
        for i, x in enumerate(leaves):
            if first.setdefault(id(x), i) < i:
                lines[i] += f", tied to {lines[first[id(x)]]}"
            elif arrays.is_dtensor(x):
                lines[i] += f", {place(x)}"
        device = local(leaves[0]).device if leaves else torch.device("cpu")
        compare_lines(lines, self, device)


def _of_ranks(ranks: list[int] | None, bucket_bytes: int) -> Distributed:
    """A world of these ranks, or of all. Collective over them."""
    group = None if ranks is None else dist.new_group(ranks, use_local_synchronization=True)
    return Distributed(group, bucket_bytes=bucket_bytes)


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors without those that lie where another one does, as tied ones may."""
    found: dict[int, Tensor] = {}
    for x in tensors:
        if x.numel():
            other = found.setdefault(x.data_ptr(), x)
            if (other.shape, other.stride()) != (x.shape, x.stride()):
                raise ValueError(
                    f"two leaves share memory, of shapes {list(other.shape)} and {list(x.shape)}: "
                    "a mean in place needs each to have its own (donate=False)"
                )
    return list(found.values())


def _pack(leaves: list[Tensor]) -> Tensor:
    """The bytes of all leaves in one buffer."""
    if not leaves:
        return torch.empty(0, dtype=torch.uint8)
    flat = [local(x).contiguous().reshape(-1).view(torch.uint8) for x in leaves]
    return torch.cat(flat)


def _unpack(message: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Tensors like the leaves from a buffer made by `_pack`."""
    results = []
    offset = 0
    for leaf in leaves:
        result = torch.empty_like(leaf, memory_format=torch.contiguous_format)
        shard = local(result)
        size = shard.numel() * shard.element_size()
        shard.reshape(-1).view(torch.uint8).copy_(message[offset : offset + size])
        results.append(result)
        offset += size
    return results
