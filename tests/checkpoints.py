"""A model and its optimizer through `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer


def save(folder: str | Path, model: Module, optimizer: Optimizer, replica: int = 0) -> None:
    # Of several equal keys it keeps one: each replica has its own.
    dcp.save({f"replica{replica}": _states(model, optimizer)}, checkpoint_id=folder)


def load(folder: str | Path, model: Module, optimizer: Optimizer, replica: int = 0) -> None:
    states = _states(model, optimizer)
    dcp.load({f"replica{replica}": states}, checkpoint_id=folder)
    set_state_dict(
        *(model, optimizer),
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def _states(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
