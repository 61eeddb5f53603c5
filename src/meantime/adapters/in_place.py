"""New values into the tensors of a script, whose storage, strides, ties and views survive."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def write(tensors: Iterable[Tensor | None], values: Iterable[Tensor | None]) -> None:
    """Copy values into tensors that are not those values already."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not None and value is not None and value is not tensor:
            tensor.copy_(value)
