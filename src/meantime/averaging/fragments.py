"""Which leaves: transforms that act on a part of the tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import torch

from meantime import tree
from meantime.keywords import forwards, pick
from meantime.made import made
from meantime.schedules import check_integer
from meantime.transform import EmptyState, Transform, as_transform
from meantime.tree import Tree

Labels = Tree | Callable[[Tree], Tree]
Places = dict[Hashable, list[int]]


@made
def partition(members: Mapping[Any, Any], labels: Labels) -> Transform:
    """Let each of several transforms act on the leaves that carry its label.

    Args:
        members: the transforms by label.
        labels: a tree of labels with the structure of the parameters, or a function of the
            parameters that returns one (of their structure and shapes alone).

    Returns:
        A transform whose state is a dict of the members' states. Each member sees the tree with
        `None` in the place of the leaves that are not its own; one that has no leaves is left out.

    Raises:
        ValueError: a leaf has a label that no member has.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.partition(
        ...     {"fast": mt.sgd(1.0), "slow": mt.sgd(0.1)}, {"w": "slow", "b": "fast"}
        ... )
        >>> params = {"w": torch.zeros(1), "b": torch.zeros(1)}
        >>> grads = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'w': tensor([-0.1000]), 'b': tensor([-1.])}
    """
    parts = {label: as_transform(member) for label, member in members.items()}
    known: tuple[Any, Places] | None = None  # of the last tree

    def places(params: Tree) -> Places:
        """The positions of the leaves of each label."""
        nonlocal known
        if torch.compiler.is_compiling():
            return look_up(params)
        leaves, spec = tree.flatten(params)
        kind = (spec, [getattr(x, "shape", None) for x in leaves], [x.dtype for x in leaves])
        if known is None or known[0] != kind:
            known = kind, look_up(params)
        return known[1]

    def look_up(params: Tree) -> Places:
        given = labels(params) if callable(labels) else labels
        named = tree.leaves(tree.map(lambda _, label: label, params, given))
        found: dict[Hashable, list[int]] = {label: [] for label in parts}
        for i, label in enumerate(named):
            if label not in found:
                path = tree.paths(params)[i] or "the root"
                raise ValueError(f"{path} is labelled {label!r}; the members are {list(parts)}")
            found[label].append(i)
        return found

    def each(
        values: Tree, where: Places, act: Callable[[Hashable, Any], Any]
    ) -> tuple[Tree, dict[Hashable, Any]]:
        """What `act(label, subtree)` makes of every part, put together again."""
        leaves, spec = tree.flatten(values)
        states = {}
        changed = False
        for label, positions in where.items():
            if not positions:
                states[label] = EmptyState()
                continue
            before = _only(leaves, spec, positions)
            part, states[label] = act(label, before)
            if part is not before:
                changed = True
                for position, leaf in zip(positions, tree.leaves(part), strict=True):
                    leaves[position] = leaf
        return (spec.unflatten(leaves) if changed else values), states

    def init(params: Tree) -> dict[Hashable, Any]:
        leaves, spec = tree.flatten(params)
        where = places(params)
        # A member without leaves has nothing to do, and cannot tell whose arrays to count with.
        return {
            label: parts[label].init(_only(leaves, spec, positions)) if positions else EmptyState()
            for label, positions in where.items()
        }

    @forwards(*(part.update for part in parts.values()))
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        where = places(updates if params is None else params)
        own, spec = (None, None) if params is None else tree.flatten(params)

        def act(label: Hashable, part: Tree) -> tuple[Tree, Any]:
            beside = None if own is None else _only(own, spec, where[label])
            function = parts[label].update
            return function(part, state[label], beside, **pick(function, extra))

        return each(updates, where, act)

    @forwards(*(part.average for part in parts.values()))
    def average(params: Tree, state: Any, **extra: Any) -> tuple[Tree, Any]:
        def act(label: Hashable, part: Tree) -> tuple[Tree, Any]:
            function = parts[label].average
            return function(part, state[label], **pick(function, extra))

        return each(params, places(params), act)

    return Transform(
        init,
        update if any(part.updates for part in parts.values()) else None,
        average if any(part.averages for part in parts.values()) else None,
    )


def _only(leaves: list[Any], spec: Any, positions: list[int]) -> Tree:
    chosen: list[Any] = [None] * len(leaves)
    for i in positions:
        chosen[i] = leaves[i]
    return spec.unflatten(chosen)


@made
def fragments(
    count: int, pattern: Literal["size", "sequential", "strided"] = "size"
) -> Callable[[Tree], Tree]:
    """Labels 0, ..., count - 1 that cut the parameters into fragments, for `partition`.

    Args:
        count: how many fragments.
        pattern: `"size"`: consecutive leaves, cut so that sizes are similar. `"sequential"`: the
            same with whole layers. `"strided"`: layer i goes to fragment i modulo `count`, so
            that each has early and late ones (Douillard et al. 2025,
            https://arxiv.org/abs/2501.18512).

    The leaves of a layer have the same path up to the first number in it (`blocks.3`), which
    orders the layers; those without a number, the same path but for its last part.

    Tied leaves stay together, in the fragment of the first.

    Returns:
        A function from parameters to labels.

    Raises:
        ValueError: `count` is below 1, or there are fewer leaves, or layers, than fragments; an
            unknown pattern.
        TypeError: `count` is not an integer.

    Example:
        >>> import torch, meantime as mt
        >>> mt.fragments(2)([torch.zeros(3), torch.zeros(1), torch.zeros(4)])
        [0, 0, 1]
        >>> mt.fragments(2, "strided")({f"blocks.{i}.w": torch.zeros(1) for i in range(4)})
        {'blocks.0.w': 0, 'blocks.1.w': 1, 'blocks.2.w': 0, 'blocks.3.w': 1}
    """
    check_integer("the number of fragments", count, 1)
    if pattern not in ("size", "sequential", "strided"):
        raise ValueError(f"pattern must be 'size', 'sequential' or 'strided', got {pattern!r}")

    def labels(params: Tree) -> Tree:
        leaves = tree.leaves(params)
        groups = list(range(len(leaves))) if pattern == "size" else _layers(params)
        sizes = [0] * (max(groups, default=-1) + 1)
        for group, leaf in zip(groups, leaves, strict=True):
            sizes[group] += tree.nbytes(leaf)
        if len(sizes) < count:
            kind = "leaves" if pattern == "size" else "layers"
            raise ValueError(f"{len(sizes)} {kind} cannot be cut into {count} fragments")
        if pattern == "strided":
            of_group = [group % count for group in range(len(sizes))]
        else:
            of_group = _consecutive(sizes, count)

        # In a graph of Dynamo `map` has an order of its own; and tied leaves stay together.
        def label(leaf: Any) -> int:
            return next(of_group[groups[i]] for i, x in enumerate(leaves) if x is leaf)

        return tree.map(label, params)

    return labels


def _consecutive(sizes: list[int], count: int) -> list[int]:
    """The fragment of each of several things in order."""
    total = sum(sizes) or 1
    found: list[int] = []
    before, last = 0, -1
    for i, size in enumerate(sizes):
        # By where its middle lies, in order, and so that no fragment stays empty.
        middle = (2 * before + size) * count // (2 * total)
        last = min(max(middle, last, count - (len(sizes) - i)), last + 1, count - 1)
        found.append(last)
        before += size
    return found


def _layers(params: Tree) -> list[int]:
    """The number of the layer of every leaf."""
    keys: list[tuple[int, int]] = []  # where such a layer was first seen, and its number
    stems: dict[tuple[str, ...], int] = {}
    for path in tree.parts(params):
        parts = [part for entry in path for part in entry.split(".")]
        first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        end = max(len(parts) - 1, 1) if first is None else first
        number = 0 if first is None else int(parts[first])
        keys.append((stems.setdefault(tuple(parts[:end]), len(stems)), number))
    order = {key: i for i, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]
