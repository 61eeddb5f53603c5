"""The state of a transform inside the state dict of a `torch.optim` optimizer.

A leaf that is shaped like a parameter goes to that parameter's state, every other one (a counter,
say) to all parameter groups. That is where `torch.distributed.checkpoint` looks for it, where it
is sharded as the parameter is, and where a plain optimizer ignores it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

PREFIX = "averager."


def pack(saved: dict[str, Any], flat: dict[str, Tensor], parameters: list[Tensor]) -> Any:
    """A state dict that holds `flat` too, a flat state in which lists of parameters end in
    their positions."""
    ids = _ids(saved)
    state = {key: dict(value) for key, value in saved["state"].items()}
    shared = {}
    for path, value in flat.items():
        place, _, last = path.rpartition(".")
        position = int(last) if last.isdecimal() else len(parameters)
        if position < len(parameters) and value.shape == parameters[position].shape:
            state.setdefault(ids[position], {})[PREFIX + place] = value
        else:
            shared[PREFIX + path] = value
    groups = [{**group, **shared} for group in saved["param_groups"]]
    return {**saved, "state": state, "param_groups": groups}


def unpack(saved: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state dict without what `pack` added, and that."""
    flat: dict[str, Tensor] = {}
    positions = {key: i for i, key in enumerate(_ids(saved))}
    state = {}
    for key, entries in saved["state"].items():
        state[key] = {k: v for k, v in entries.items() if not _packed(k)}
        for name in filter(_packed, entries):
            flat[f"{name.removeprefix(PREFIX)}.{positions[key]}".lstrip(".")] = entries[name]
    groups = []
    for group in saved["param_groups"]:
        groups.append({k: v for k, v in group.items() if not _packed(k)})
        flat.update({k.removeprefix(PREFIX): v for k, v in group.items() if _packed(k)})
    state = {key: entries for key, entries in state.items() if entries}
    return {**saved, "state": state, "param_groups": groups}, flat


def _ids(saved: dict[str, Any]) -> list[Any]:
    return [key for group in saved["param_groups"] for key in group["params"]]


def _packed(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)
