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
"""What a state holds of one parameter, by its path there; and what it holds of all of them."""


Place = tuple[int | None, str]
"""The position of the parameter a leaf of a state belongs to, None if to all of them, and the
path of the leaf less that position."""


class Layout(NamedTuple):
    """The structure of a state with every list of parameters as one leaf, the paths of these
    leaves, and those among them that are no lists: what the parameters share (a counter, say)."""

    spec: Any
    names: tuple[str, ...]
    shared: frozenset[str]

    def join(self, rows: list[Entries]) -> Any:
        """The state of parameters with these entries, which agree in what they share."""
        return self.spec.unflatten(
            [
                next(entries[name] for entries in rows if name in entries)
                if name in self.shared
                else [entries.get(name) for entries in rows]
                for name in self.names
            ]
        )

    def split(self, state: Any, rows: list[Entries]) -> None:
        """Put the state into the entries that it was joined of."""
        for name, column in zip(self.names, self.spec.flatten_up_to(state), strict=True):
            for i, entries in enumerate(rows):
                if name in entries:
                    entries[name] = column if name in self.shared else column[i]

    def alike(self, rows: Mapping[Tensor, Entries]) -> list[list[Tensor]]:
        """The parameters in groups that agree in what they share, as `join` wants them."""
        seen: dict[int, Any] = {}  # usually they share one tensor
        groups: list[tuple[list[Tensor], dict[str, Any]]] = []
        for parameter, entries in rows.items():
            values = {}
            for name in self.shared & entries.keys():
                key = id(entries[name])
                if key not in seen:
                    seen[key] = entries[name].tolist()
                values[name] = seen[key]
            for members, agreed in groups:
                if all(agreed.get(name, value) == value for name, value in values.items()):
                    members.append(parameter)
                    agreed.update(values)
                    break
            else:
                groups.append(([parameter], values))
        return [members for members, _ in groups]


def layout(tx: Transform, parameters: list[Tensor]) -> Layout:
    """The layout of the state of these parameters, which is not made for it."""
    return _apart(tx.init([_abstract(p) for p in parameters]))[0]


def places(state: Any, count: int) -> dict[str, Place]:
    """Where each leaf of the state of so many parameters belongs, by its path."""
    found: dict[str, Place] = {}
    kept, columns = _apart(state)
    for name, column in zip(kept.names, columns, strict=True):
        shared = name in kept.shared or len(column) != count  # a list of something else
        rows = [(None, column)] if shared else enumerate(column)
        for position, entry in rows:
            for rest in state_dict(entry):
                parts = name, "" if position is None else str(position), rest
                found[_joined(*parts)] = position, _joined(name, rest)
    return found


def new_entries(tx: Transform, parameter: Tensor) -> Entries:
    """Those of a parameter that was not stepped yet."""
    kept, columns = _apart(tx.init([parameter]))
    found = {
        name: column if name in kept.shared else column[0]
        for name, column in zip(kept.names, columns, strict=True)
    }
    return {name: value for name, value in found.items() if value is not None}


def restored_entries(tx: Transform, parameter: Tensor, saved: Entries) -> Entries:
    """Copies of the saved entries of a parameter, each on the device where a new one is.

    Raises:
        ValueError: keys, shapes or dtypes are not those of new entries.
    """
    template = new_entries(tx, _abstract(parameter))
    load_state_dict(template, state_dict(saved))

    def placed(value: Tensor, like: Tensor) -> Tensor:
        return value.to(parameter.device if like.is_meta else like.device, copy=True)

    return tree.map(placed, saved, template)


def _apart(state: Any) -> tuple[Layout, list[Any]]:
    columns, spec = optree.tree_flatten(state, is_leaf=_is_list)
    names = tuple(state_dict(spec.unflatten(range(len(columns)))))
    shared = frozenset(name for name, x in zip(names, columns, strict=True) if not _is_list(x))
    return Layout(spec, names, shared), columns


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _is_list(node: Any) -> bool:
    # States are made of tuples and dicts: a list is what the parameters were given as.
    return type(node) is list


def _abstract(like: Tensor) -> Tensor:
    """A tensor of this shape and dtype without memory, to see what a transform makes of it."""
    return torch.empty(like.shape, dtype=like.dtype, device="meta")
