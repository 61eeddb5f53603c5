"""Count what is communicated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.codecs.layout import nbytes
from meantime.replicas.base import Replicas
from meantime.tree import Tree


@dataclass
class Recorded:
    """Any replicas, with a record of every collective.

    Attributes:
        replicas: who does the work.
        calls: the collectives in order, as (name, bytes of this replica's message); the bytes
            are those of the compressed message where there is a codec.
        seconds: time spent in them on this replica, waiting for slower ones included.

    Only what is executed is recorded: under `vmap` both branches of a conditional are.

    Example:
        >>> import torch, meantime as mt
        >>> world = mt.Recorded(mt.Solo())
        >>> tx = mt.periodic(mt.average_params(), every=2)
        >>> params = torch.zeros(3)
        >>> state = tx.init(params)
        >>> for _ in range(4):
        ...     params, state = tx.average(params, state, replicas=world)
        >>> [name for name, _ in world.calls]
        ['mean', 'mean']
    """

    replicas: Replicas
    calls: list[tuple[str, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def size(self) -> int:
        return self.replicas.size

    @property
    def rank(self) -> Array:
        return self.replicas.rank

    @property
    def bytes(self) -> int:
        """The bytes of all messages this replica contributed to a collective."""
        return sum(size for _, size in self.calls)

    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        return self._record("mean", tree, weight=weight, codec=codec, donate=donate)

    def gather(self, tree: Tree) -> Tree:
        return self._record("gather", tree)

    def permute(self, tree: Tree, sources: Sequence[int]) -> Tree:
        return self._record("permute", tree, sources)

    def shift(self, tree: Tree, by: int) -> Tree:
        return self._record("shift", tree, by)

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        return self._record("broadcast", tree, root)

    def groups(self, size: int) -> Recorded:
        """A group with a record of its own."""
        return Recorded(self.replicas.groups(size))

    def _record(self, name: str, tree: Tree, *arguments: Any, **options: Any) -> Tree:
        self.calls.append((name, nbytes(tree, options.get("codec"))))
        start = time.perf_counter()
        try:
            return getattr(self.replicas, name)(tree, *arguments, **options)
        finally:
            self.seconds += time.perf_counter() - start
