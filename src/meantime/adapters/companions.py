"""What goes along with the parameters: buffers of the model, the state of the local optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from meantime.adapters.in_place import write
from meantime.adapters.start import check_choice
from meantime.arrays import is_inexact
from meantime.replicas.agreement import compare_lines
from meantime.replicas.base import Replicas
from meantime.tree import all_finite


class Companions:
    """What is synchronised after the parameters, by the policies of `AveragingOptimizer`.

    Attributes:
        buffers: those of the model that take part, each once.
    """

    def __init__(
        self, optimizer: Optimizer, model: Module | None, buffers: str, optimizer_state: str
    ):
        check_choice("buffers", buffers, ("mean", "broadcast", "ignore"))
        check_choice("optimizer_state", optimizer_state, ("keep", "average", "reset"))
        self.buffers = [] if model is None or buffers == "ignore" else _persistent(model)
        self._optimizer = optimizer
        self._broadcast, self._optimizer_state = buffers == "broadcast", optimizer_state

    def synchronise(self, parameters: list[Tensor], world: Replicas, weight: Any) -> None:
        """After a synchronisation of these parameters."""
        self.synchronise_buffers(world, weight)
        if self._optimizer_state == "average":
            average_finite(_moments(self._optimizer, parameters, world), world, weight)
        elif self._optimizer_state == "reset":
            for parameter in parameters:
                self._optimizer.state.pop(parameter, None)

    def synchronise_buffers(self, world: Replicas, weight: Any = None) -> None:
        if not self.buffers:
            return
        if self._broadcast:
            write(self.buffers, world.broadcast(self.buffers))
        else:
            average_finite(self.buffers, world, weight)


def _persistent(model: Module) -> list[Tensor]:
    """The buffers that belong to a checkpoint (the others are constants), each once."""
    saved = model.state_dict().keys()
    found = {id(buffer): buffer for name, buffer in model.named_buffers() if name in saved}
    return list(found.values())


def _moments(optimizer: Optimizer, parameters: list[Tensor], world: Replicas) -> list[Tensor]:
    """The state tensors that are shaped like their parameters: moments, but no counters.

    Raises:
        ValueError: on all replicas, if one has others (for lack of gradients, say).
    """
    found = {}
    for i, parameter in enumerate(parameters):
        entries = optimizer.state.get(parameter, {})
        for name in sorted(entries):
            value = entries[name]
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found[f"the optimizer's {name} of parameter {i}"] = value
    compare_lines(list(found), world, parameters[0].device)
    return list(found.values())


@torch.no_grad()
def average_finite(tensors: list[Tensor], world: Replicas, weight: Any = None) -> None:
    r"""Set each tensor to the mean over the replicas whose tensor is finite, in place.

    .. math:: x \leftarrow \sum_k w_k f_k x_k \Big/ \sum_k w_k f_k, \qquad
              f_k = [x_k \text{ is finite}]

    One that no replica has finite stays. Integers and bools take the maximum.
    """
    if not tensors:
        return
    floating = [x for x in tensors if is_inexact(x)]
    checks = [all_finite([x]).to(tensors[0].device) for x in floating]
    finite = torch.stack(checks).tolist() if checks else []  # waits for an accelerator once
    messages = [x if f else torch.zeros_like(x) for x, f in zip(floating, finite, strict=True)]
    flags = torch.tensor(finite, dtype=torch.float32, device=tensors[0].device)
    others = [x for x in tensors if not is_inexact(x)]
    means, share, maxima = world.mean((messages, flags, others), weight=weight)
    for x, mean, part in zip(floating, means, share.tolist(), strict=True):
        if part > 0:
            x.copy_(mean if part == 1 else mean / part)
    for x, largest in zip(others, maxima, strict=True):
        x.copy_(largest)
