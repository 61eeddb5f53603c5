"""The trees that are measured."""

from __future__ import annotations

import torch
import typer
from torch import Tensor

SHAPES = ["300x1000", "160x160000"]
"""Many small leaves, and large ones: 25.6 M elements."""


def parse(shape: str) -> tuple[int, int]:
    """The count and the length of the leaves in COUNTxSIZE."""
    count, _, length = shape.partition("x")
    if not (count.isdigit() and length.isdigit() and int(count) and int(length)):
        raise typer.BadParameter(f"{shape!r} is not COUNTxSIZE, for example 300x1000")
    return int(count), int(length)


def tree(count: int, length: int, seed: int) -> dict[str, Tensor]:
    """So many random float32 vectors."""
    generator = torch.Generator().manual_seed(seed)
    return {f"leaf{i:03d}": torch.randn(length, generator=generator) for i in range(count)}
