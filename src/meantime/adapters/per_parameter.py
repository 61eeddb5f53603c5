"""The state of a transform over a list of parameters, as a dict for each of them and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from meantime import tree
from meantime.state import load_state_dict, state_dict
from meantime.transform import Transform

Entries = dict[str, Any]
"""What belongs to one parameter, by the path in the state."""


class Layout(NamedTuple):
    """Where the lists of parameters are in a state: its structure with each of them as one leaf,
    the paths of all leaves, and those of leaves that are none (counters, say)."""

    spec: Any
    names: tuple[str, ...]
    shared: frozenset[str]

    def split(self, state: Any, count: int) -> list[Entries]:
        """The entries of each of so many parameters; shared leaves are in all of them."""
        found: list[Entries] = [{} for _ in range(count)]
        for name, column in zip(self.names, self.spec.flatten_up_to(state), strict=True):
            for i, entries in enumerate(found):
                value = column if name in self.shared else column[i]
                if value is not None:  # a part of the tree without this parameter
                    entries[name] = value
        return found

    def join(self, rows: list[Entries]) -> Any:
        """The state of parameters with these entries, which agree in what they share."""
        return self.spec.unflatten(
            [
                rows[0][name] if name in self.shared else [entries.get(name) for entries in rows]
                for name in self.names
            ]
        )

    def alike(self, rows: Mapping[Tensor, Entries]) -> list[list[Tensor]]:
        """The parameters in groups that agree in what they share, as `join` wants them."""
        values: dict[int, str] = {}  # most parameters share the very tensor
        groups: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter, entries in rows.items():
            key = []
            for name in sorted(self.shared):
                value = entries[name]
                if id(value) not in values:
                    values[id(value)] = repr(value.tolist())
                key.append(values[id(value)])
            groups.setdefault(tuple(key), []).append(parameter)
        return list(groups.values())


def layout(tx: Transform, like: Tensor) -> Layout:
    """The layout of the states of a transform, for parameters such as this one."""
    one = _abstract(like)
    columns, spec = optree.tree_flatten(tx.init([one, one]), is_leaf=_is_list)
    names = tuple(state_dict(spec.unflatten(range(len(columns)))))
    shared = frozenset(name for name, x in zip(names, columns, strict=True) if not _is_list(x))
    return Layout(spec, names, shared)


def restore(tx: Transform, parameter: Tensor, saved: Entries) -> Entries:
    """Copies of the saved entries of a parameter, each where a new state has it.

    Raises:
        ValueError: keys, shapes or dtypes are not those of a new state.
    """
    (template,) = layout(tx, parameter).split(tx.init([_abstract(parameter)]), 1)
    load_state_dict(template, state_dict(saved))

    def placed(value: Tensor, like: Tensor) -> Tensor:
        return value.to(parameter.device if like.is_meta else like.device, copy=True)

    return tree.map(placed, saved, template)


def _abstract(like: Tensor) -> Tensor:
    """A tensor of this shape and dtype without memory, to see what a transform makes of it."""
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


def _is_list(node: Any) -> bool:
    # States are made of tuples and dicts: a list is what the parameters are given as.
    return type(node) is list
