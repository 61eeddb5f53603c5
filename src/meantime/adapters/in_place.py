"""New values into the tensors of a script, whose storage, strides, ties and views survive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


@torch.no_grad()
def write(tensors: Iterable[Any], values: Iterable[Any]) -> None:
    """Copy values into tensors that are not those values already; `None` stands where `None` is."""
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)
