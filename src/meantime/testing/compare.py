"""Comparing trees: where they differ first, bit for bit or within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from meantime import arrays, tree
from meantime.tree import Tree

ROUNDINGS = 16.0
"""How many units in the last place of a leaf's largest number `close` allows."""


class Difference(AssertionError):
    """Two trees differ: the path of the leaf, and how."""

    def __init__(self, path: str, reason: str):
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


def same_form(name: str, found: Tree, wanted: Tree) -> None:
    """Both trees have the same structure, and leaves of the same kind, shape, dtype and device.

    Raises:
        Difference: at the first leaf that differs; paths begin with `name`.
    """
    structure, expected = optree.tree_structure(found), optree.tree_structure(wanted)
    if structure != expected:
        raise Difference(name, f"the structure is {structure} instead of {expected}")
    for path, a, b in _rows(name, found, wanted):
        if _form(a) != _form(b):
            raise Difference(path, f"{_form(a)} instead of {_form(b)}")


def same_bits(name: str, found: Tree, wanted: Tree, claim: str) -> None:
    """Both trees are equal bit for bit; any NaN equals any other.

    Args:
        claim: what is wrong if they are not.
    """
    same_form(name, found, wanted)
    for path, a, b in _rows(name, found, wanted):
        if not _equal_bits(a, b):
            raise Difference(path, f"{claim}: found {a}, expected {b}")


def close(
    name: str,
    found: Tree,
    wanted: Tree,
    claim: str,
    *,
    scale: Tree = None,
    roundings: float = ROUNDINGS,
) -> None:
    """Both trees are equal up to a few roundings.

    Args:
        claim: what is wrong if they are not.
        scale: a tree of the same structure; rounding is relative to the largest number in its
            leaf (the largest that was summed, say). By default that of `wanted`.
        roundings: how many units in the last place of that number.
    """
    same_form(name, found, wanted)
    scales = tree.leaves(wanted if scale is None else scale)
    for (path, a, b), size in zip(_rows(name, found, wanted), scales, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
            largest = size.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()
            bound = roundings * float(torch.finfo(a.dtype).eps * largest + 1e-30)
            x, y = a.detach().double(), b.detach().double()
            agree = torch.allclose(x, y, rtol=0.0, atol=bound, equal_nan=True)
        else:
            agree = _equal_bits(a, b)
        if not agree:
            raise Difference(path, f"{claim}: found {a}, expected {b}")


def larger(values: Tree, drawn: Tree) -> Tree:
    """The scale of values that may be what is left of much larger ones, those that were drawn,
    and that may depend on all of these, by a norm, which is as exact as the coarsest of them."""

    def sizes(x: Tensor) -> Tensor:
        return x.detach().double().abs().reshape(-1)

    def unit(x: Tensor) -> float:
        return torch.finfo(arrays.wide_dtype(x)).eps if x.is_floating_point() else 0.0

    others = [sizes(x) for x in tree.leaves(drawn)]
    coarsest = max(map(unit, tree.leaves(drawn)), default=0.0)

    def scale(x: Tensor) -> Tensor:
        own = unit(x) or 1.0
        return torch.cat([sizes(x), *others]) * max(coarsest / own, 1.0)

    return tree.map(scale, values)


def _rows(name: str, found: Tree, wanted: Tree) -> Iterator[tuple[str, Any, Any]]:
    paths = [name + path for path in tree.paths(wanted)]
    yield from zip(paths, tree.leaves(found), tree.leaves(wanted), strict=True)


def _form(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)} on {x.device}"


def _equal_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.is_floating_point():
        nan = a.isnan() & b.isnan()
        a, b = a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0)
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
