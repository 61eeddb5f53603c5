"""Parameters in one stretch of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meantime._foreach import plain
from meantime.replicas.pieces import is_aligned
from meantime.replicas.shards import without_values


@torch.no_grad()
def arena(parameters: Iterable[Tensor]) -> list[Tensor]:
    r"""Move parameters, once, into one buffer for each dtype and device.

    `Distributed.mean(parameters, donate=True)` then reduces the buffers where they are, and packs
    nothing: on one machine it takes as long as one bare `all_reduce`. `AveragingOptimizer` does it
    with `arena=True`.

    The parameters remain the same objects with the same values, shapes, strides and gradients:
    modules and optimizers that hold them do not notice. Those that share their memory (tied
    weights) go on sharing it. Contiguous parameters gain; others, such as those in
    `channels_last`, are moved as well but still packed.

    What was taken of their memory before is cut loose: views of `parameter.data`, a captured CUDA
    graph. `torch.save` of one parameter writes the whole buffer: save the model, or a clone.

    Args:
        parameters: of `model.parameters()`, say, in the order in which they will be averaged (a
            dict is averaged in the order of its keys: pass `mt.tree.leaves` of it).

    Returns:
        The buffers, flat.

    Raises:
        TypeError: a parameter is sharded, of a tensor subclass, not on a real device, has no
            values yet, is not strided, or is no leaf of the autograd graph.
        ValueError: a parameter does not fill memory of its own, or shares it with other processes.
            Nothing is moved then.

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import arena
        >>> model = torch.nn.Linear(64, 16)
        >>> [buffer.shape for buffer in arena(model.parameters())]
        [torch.Size([1040])]
    """
    tensors = list({id(x): x for x in parameters}.values())
    tied: dict[int, list[Tensor]] = {}
    for i, x in enumerate(tensors):
        _check(x, i)
        tied.setdefault(x.untyped_storage().data_ptr() or id(x), []).append(x)
    for group in tied.values():
        if len({x.dtype for x in group}) > 1:
            raise ValueError(f"parameters of different dtypes share their memory: {group}")
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for group in tied.values():
        kinds.setdefault((group[0].dtype, group[0].device), []).append(group)
    buffers = []
    for (dtype, device), groups in kinds.items():
        # Those whose length leaves the next one aligned first, as messages have them.
        groups.sort(key=lambda group: not is_aligned(group[0].numel()))
        lengths = [group[0].numel() for group in groups]
        buffer = torch.empty(sum(lengths), dtype=dtype, device=device)
        start = 0
        for group, part in zip(groups, buffer.split(lengths), strict=True):
            part.copy_(group[0].as_strided(part.shape, (1,)))  # in the order of memory
            for x in group:
                x.data = buffer.as_strided(x.shape, x.stride(), start)
            start += len(part)
        buffers.append(buffer)
    return buffers


def _check(x: Tensor, i: int) -> None:
    """Refuse what cannot be moved."""
    if (lack := without_values(x)) is not None:
        raise TypeError(f"parameter {i} {lack}")
    who = f"parameter {i}, {list(x.shape)},"
    if not plain(x):
        raise TypeError(f"{who} is a {type(x).__name__}, which does not live in ordinary memory")
    if x.layout is not torch.strided:
        raise TypeError(f"{who} has the layout {x.layout}: only strided ones can be moved")
    if x.grad_fn is not None:
        raise TypeError(
            f"{who} is the result of {x.grad_fn.name()}: pass the parameters themselves"
        )
    if x.is_cpu and x.is_shared():
        raise ValueError(f"{who} is in memory shared with other processes, which would lose it")
    if x.untyped_storage().nbytes() != x.numel() * x.element_size() or not _is_dense(x):
        raise ValueError(
            f"{who} of strides {x.stride()} is a view that does not fill its memory: moving it "
            "would cut it loose from the rest"
        )


def _is_dense(x: Tensor) -> bool:
    """Whether every element has its own place, with no gaps."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return x.numel() == 0
            expected *= size
    return True
