"""One replica that trains: by a transform of this library, or by torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

import meantime as mt
from meantime.cli.tasks import Params

Loss = Callable[[Params, Tensor], Tensor]


class Trainer(Protocol):
    """One replica that is trained step by step."""

    @property
    def params(self) -> Params: ...

    @property
    def synchronisations(self) -> int:
        """How many there were so far."""

    @property
    def message_bytes(self) -> int:
        """What this replica contributed to them."""

    def step(self, rows: Tensor) -> None:
        """Train on the examples with these indices."""


class FunctionalTrainer:
    """A transform of this library."""

    def __init__(self, loss: Loss, start: Params, tx: mt.Transform):
        self.params = mt.tree.map(torch.clone, start)
        self._state = tx.init(self.params)
        self._tx = tx
        self._gradient = mt.value_and_grad(loss)
        self._world = mt.Recorded(mt.Distributed())

    def step(self, rows: Tensor) -> None:
        _, grads = self._gradient(self.params, rows)
        self.params, self._state = mt.step(
            self._tx, grads, self.params, self._state, replicas=self._world, donate=True
        )

    @property
    def synchronisations(self) -> int:
        return len(self._world.calls)

    @property
    def message_bytes(self) -> int:
        return self._world.bytes


class DDPTrainer:
    """torch's DistributedDataParallel, which averages gradients while it computes others."""

    def __init__(self, loss: Loss, start: Params, learning_rate: float):
        model = _Module(loss, start)
        self._model = torch.nn.parallel.DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.params: Params = dict(model.leaves)
        self.synchronisations = 0

    def step(self, rows: Tensor) -> None:
        self._optimizer.zero_grad()
        self._model(rows).backward()
        self._optimizer.step()
        self.synchronisations += 1

    @property
    def message_bytes(self) -> int:
        return self.synchronisations * mt.tree.nbytes(self.params)


class _Module(torch.nn.Module):
    def __init__(self, loss: Loss, start: Params):
        super().__init__()
        self._loss = loss
        self.leaves = torch.nn.ParameterDict({name: x.clone() for name, x in start.items()})

    def forward(self, rows: Tensor) -> Tensor:
        return self._loss(dict(self.leaves), rows)
