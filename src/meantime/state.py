"""Looking into a state, and taking it across the checkpoint boundary.

A state is a tree of arrays in named tuples, tuples and dicts. At the checkpoint boundary it
becomes a flat dict of arrays keyed by field path, which `torch.load(weights_only=True)` and
`torch.distributed.checkpoint` read, and which is restored into a template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree
import torch

from meantime import tree
from meantime.arrays import Array

S = TypeVar("S")


def find_all(state: Any, kind: type[S]) -> list[S]:
    """Every state of that type, wherever it is nested, in order."""
    found = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def find(state: Any, kind: type[S]) -> S:
    """The one state of that type.

    Raises:
        LookupError: there is none or there are several; what is there is listed.

    Example:
        >>> import torch, meantime as mt
        >>> state = mt.diloco(mt.adamw(1e-3), every=10).init(torch.zeros(2))
        >>> mt.find(state, mt.OuterState).anchor
        tensor([0., 0.])
    """
    found = find_all(state, kind)
    if len(found) == 1:
        return found[0]
    kinds: set[str] = set()

    def note(node: Any) -> bool:
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            kinds.add(type(node).__name__)
        return False

    optree.tree_leaves(state, is_leaf=note)
    raise LookupError(
        f"{'several states' if found else 'no state'} of type {kind.__name__}; this state holds "
        + (", ".join(sorted(kinds)) or "no named states")
        + (". Take one of mt.find_all(...)." if found else "")
    )


def keeps_apart(*, forced: bool = False) -> Callable[[type[S]], type[S]]:
    """Decorate the state of an averager after which replicas have different parameters; `forced`,
    also where the synchronisation was forced with `now=True`."""

    def decorate(kind: type[S]) -> type[S]:
        kind.keeps_apart = forced  # type: ignore[attr-defined]
        return kind

    return decorate


def leaves_equal(state: Any, forced: bool) -> bool:
    """Whether all averagers of the state leave replicas equal after a synchronisation."""
    kept: list[bool] = []

    def note(node: Any) -> bool:
        if hasattr(type(node), "keeps_apart"):
            kept.append(type(node).keeps_apart or not forced)
        return False

    optree.tree_leaves(state, is_leaf=note)
    return not any(kept)


def state_dict(state: Any) -> dict[str, Array]:
    """The state as a flat dict from field path to array.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.chain(mt.trace(0.9), mt.periodic(mt.average_params(), every=4))
        >>> sorted(mt.state_dict(tx.init({"w": torch.zeros(2)})))
        ['0.count', '0.trace.w', '1.averager.rejected', '1.count', '1.due', '1.start']
    """
    return dict(zip(_keys(state), tree.leaves(state), strict=True))


def load_state_dict(template: Any, saved: dict[str, Array]) -> Any:
    """The saved state in the structure of `template`, a state made by the same transform.

    Raises:
        ValueError: keys, shapes or dtypes do not fit; nothing is loaded then.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.sgd(0.1, momentum=0.9)
        >>> params = torch.ones(2)
        >>> _, state = tx.update(torch.ones(2), tx.init(params), params)
        >>> restored = mt.load_state_dict(tx.init(params), mt.state_dict(state))
        >>> restored[0].trace
        tensor([1., 1.])
    """
    keys = _keys(template)
    missing, unknown = sorted(set(keys) - set(saved)), sorted(set(saved) - set(keys))
    if missing or unknown:
        raise ValueError(
            f"the saved state does not fit this transform: missing {missing or 'nothing'}, "
            f"unexpected {unknown or 'nothing'}"
        )
    leaves, spec = optree.tree_flatten(template)
    for key, leaf in zip(keys, leaves, strict=True):
        have, want = saved[key], leaf
        if tuple(have.shape) != tuple(want.shape) or str(have.dtype) != str(want.dtype):
            raise ValueError(
                f"the saved state does not fit at {key!r}: it has {have.dtype}"
                f"{list(have.shape)}, this transform {want.dtype}{list(want.shape)}"
            )
    restored = [_beside(saved[key], leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return spec.unflatten(restored)


def _beside(value: Array, leaf: Array) -> Array:
    """A copy of a saved tensor on the device of the leaf it replaces."""
    return value.to(leaf.device, copy=True) if isinstance(value, torch.Tensor) else value


def _keys(state: Any) -> list[str]:
    keys = [".".join(parts) for parts in tree.parts(state)]
    if len(set(keys)) < len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"two leaves of the state have the same path {twice!r}: rename one")
    return keys
