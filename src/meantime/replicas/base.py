"""What a world of replicas can do, and how a transform finds the one it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from meantime import arrays, tree
from meantime.arrays import Array
from meantime.codecs import Codec
from meantime.tree import Tree


class Replicas(Protocol):
    """The replicas that train together, seen from one of them.

    Every method is collective: all replicas call it, with trees of the same structure, shapes
    and dtypes. None writes to what it is given, unless told so by `donate`.
    """

    @property
    def size(self) -> int:
        """How many replicas there are."""
        ...

    @property
    def rank(self) -> Array:
        """Which one this is, from 0."""
        ...

    def mean(
        self,
        tree: Tree,
        *,
        weight: Array | None = None,
        codec: Codec | None = None,
        donate: bool = False,
    ) -> Tree:
        r"""The mean over replicas, the same bits on all of them.

        .. math:: \bar x = \sum_k w_k x_k \Big/ \sum_k w_k

        accumulated in at least float32, divided after the sum, cast back. A replica of weight
        0 takes no part, whatever its values. If all have weight 0 there is no mean: the result
        is NaN, or the tree itself where that was donated. Integers and bools are not averaged:
        they take the maximum.

        With a codec :math:`C`, replicas send their values compressed:

        .. math:: \bar x = C\Big(\sum_k w_k \, C(x_k) \Big/ \sum_k w_k\Big)

        summed in float32, without the outer :math:`C` if the codec is sparse. All floating
        leaves are compressed as one vector, in the order of optree; integers and bools are not.
        """
        ...

    def gather(self, tree: Tree) -> Tree:
        """All replicas' values, on a new leading axis of length `size`."""
        ...

    def permute(self, tree: Tree, sources: Sequence[int]) -> Tree:
        """The values of replica `sources[rank]`; `sources` is a permutation of all ranks."""
        ...

    def shift(self, tree: Tree, by: int) -> Tree:
        """The values of replica `(rank - by) % size`: everyone sends `by` places up a ring."""
        ...

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """The values of replica `root`, bit for bit."""
        ...

    def groups(self, size: int) -> Replicas:
        """The replicas in groups of `size` consecutive ranks: this replica's group."""
        ...


Levels = Replicas | Mapping[str, Replicas]


def resolve(replicas: Levels | None, over: str | None, who: str) -> Replicas:
    """The world a transform talks to.

    Raises:
        TypeError: no replicas were passed, or several and `over` does not name one.
    """
    if replicas is None:
        raise TypeError(
            f"{who} has to communicate: pass replicas=..., for example replicas=Solo() for one "
            "replica or replicas=Distributed() in a torch.distributed job"
        )
    if not isinstance(replicas, Mapping):
        if over is not None:
            raise TypeError(
                f"{who} averages over {over!r}: pass a mapping, replicas={{{over!r}: ...}}, "
                f"got {replicas!r}"
            )
        return replicas
    if over is None or over not in replicas:
        raise TypeError(
            f"{who} cannot tell which replicas it averages over: over={over!r}, and the levels "
            f"passed are {sorted(replicas)}"
        )
    return replicas[over]


def check_groups(size: int, group: int) -> None:
    """Refuse a group size that does not divide the world."""
    if not (isinstance(group, int) and group >= 1 and size % group == 0):
        raise ValueError(f"{size} replicas cannot be split into groups of {group!r}")


def check_permutation(sources: Sequence[int], size: int) -> list[int]:
    """The ranks to receive from, of which every replica is one."""
    ranks = list(sources)
    if sorted(ranks) != list(range(size)):
        raise ValueError(
            f"sources must name each of the {size} replicas once, 0 to {size - 1}, got {sources!r}"
        )
    return ranks


def rotation(by: int, size: int) -> list[int]:
    """The permutation of `Replicas.shift`."""
    return [(rank - by) % size for rank in range(size)]


def mean_by_sums(
    values: Tree,
    weight: Array | None,
    size: int,
    all_sum: Callable[[Array], Array],
    all_max: Callable[[Array], Array],
) -> Tree:
    """The mean of `Replicas.mean` from a sum and a maximum over replicas, leaf by leaf."""
    total: Any = size if weight is None else all_sum(weight)

    def mean(x: Array) -> Array:
        if not arrays.is_inexact(x):
            return all_max(x)
        wide = arrays.astype(x, arrays.wide_dtype(x))
        if weight is not None:
            wide = arrays.where(weight > 0, weight * wide, arrays.namespace(x).zeros_like(wide))
        return arrays.astype(all_sum(wide) / total, x.dtype)

    return tree.map(mean, values)
