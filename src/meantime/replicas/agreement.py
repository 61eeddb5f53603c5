"""Whether all replicas are about to do the same.

Replicas that hold different trees, or follow different schedules, would average what does not
belong together, or wait for each other for ever. It is found before the first mean, and named.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from meantime import tree
from meantime.replicas.base import Replicas
from meantime.tree import Tree


def check_agreement(tx: Any, params: Tree, replicas: Replicas) -> None:
    """Compare the transform and the structure of the parameters on all replicas.

    Call it once before a training loop, on every replica (it is collective):
    `AveragingOptimizer` does. Transforms are compared as the calls that made them.

    Args:
        tx: the transform.
        params: its parameters; torch tensors.
        replicas: all of them.

    Raises:
        ValueError: on every replica, naming the first one that differs from replica 0, and in what.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.local_sgd(mt.sgd(0.1), every=8)
        >>> mt.check_agreement(tx, {"w": torch.zeros(2)}, mt.Solo())
    """
    leaves = tree.leaves(params)
    device = leaves[0].device if leaves else torch.device("cpu")
    compare_lines([repr(tx), *describe(params)], replicas, device)


def describe(params: Tree) -> list[str]:
    """A line for every leaf: path, dtype, shape."""
    return [
        f"{path or 'the root'}: {leaf.dtype} {list(leaf.shape)}"
        for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True)
    ]


def compare_lines(lines: list[str], replicas: Replicas, device: torch.device) -> None:
    """Raise on every replica unless all have the same lines.

    Args:
        device: where messages are made: that of the parameters, as a backend may know no other.
    """
    text = "\n".join(lines).encode()

    def message(data: bytes) -> torch.Tensor:
        return torch.tensor(list(data), dtype=torch.uint8, device=device)

    mine = message(hashlib.sha256(text).digest())
    if bool((replicas.gather(mine) == mine).all()):
        return
    # Of integers the mean is the maximum.
    length = int(replicas.mean(torch.tensor(len(text), device=device)))
    everyone = replicas.gather(message(text.ljust(length, b"\0")))
    texts = [bytes(row.tolist()).rstrip(b"\0").decode().splitlines() for row in everyone]
    raise ValueError(_difference(texts))


def _difference(texts: list[list[str]]) -> str:
    """What the first replica that differs from replica 0 has otherwise."""
    for rank, lines in enumerate(texts):
        for i in range(max(len(lines), len(texts[0]))):
            mine, first = (t[i] if i < len(t) else "nothing" for t in (lines, texts[0]))
            if mine != first:
                return f"replicas do not agree: rank 0 has {first}, rank {rank} has {mine}"
    return "replicas do not agree"  # unreachable: their fingerprints differ
