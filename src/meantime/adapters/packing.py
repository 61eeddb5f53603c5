"""The state of a transform inside the state dict of a `torch.optim` optimizer.

What a state keeps of a parameter goes to that parameter's state, everything else (a counter, say)
to all parameter groups. That is where `torch.distributed.checkpoint` looks for it, where it is
sharded as the parameter is, and where a plain optimizer ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meantime.adapters.per_parameter import Place

_PREFIX = "averager."


def pack(
    saved: dict[str, Any], flat: dict[str, Tensor], places: dict[str, Place]
) -> dict[str, Any]:
    """A state dict that holds `flat` too, a flat state with the places of its leaves."""
    ids = _ids(saved)
    state = {key: dict(value) for key, value in saved["state"].items()}
    shared: dict[str, Tensor] = {}
    for path, value in flat.items():
        position, name = places.get(path, (None, path))
        if position is None:
            shared[name] = value
        else:
            state.setdefault(ids[position], {})[_PREFIX + name] = value
    return share({**saved, "state": state}, shared)


def share(saved: Mapping[str, Any], shared: dict[str, Tensor]) -> dict[str, Any]:
    """A state dict whose parameters share these values."""
    packed = {_PREFIX + name: value for name, value in shared.items()}
    return {**saved, "param_groups": [{**group, **packed} for group in saved["param_groups"]]}


def unpack(
    saved: dict[str, Any], places: dict[str, Place]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state dict without what `pack` added, and that."""
    flat: dict[str, Tensor] = {}
    paths = {place: path for path, place in places.items()}
    positions = {key: i for i, key in enumerate(_ids(saved))}
    state = {}
    for key, entries in saved["state"].items():
        state[key] = {k: v for k, v in entries.items() if not _packed(k)}
        for packed in filter(_packed, entries):
            name = packed.removeprefix(_PREFIX)
            # What has no place here is reported by this path.
            path = paths.get((positions[key], name), f"{name} of parameter {positions[key]}")
            flat[path] = entries[packed]
    groups = []
    for group in saved["param_groups"]:
        groups.append({k: v for k, v in group.items() if not _packed(k)})
        flat.update({k.removeprefix(_PREFIX): v for k, v in group.items() if _packed(k)})
    state = {key: entries for key, entries in state.items() if entries}
    return {**saved, "state": state, "param_groups": groups}, flat


def _ids(saved: dict[str, Any]) -> list[Any]:
    return [key for group in saved["param_groups"] for key in group["params"]]


def _packed(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(_PREFIX)
