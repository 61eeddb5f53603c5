"""Replicas with different amounts of data: `torch.distributed.algorithms.Join`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from meantime.adapters.averaging import Averaging
from meantime.keywords import pick


class Joining(Joinable):
    """What `Join` asks of an optimizer."""

    _averaging: Averaging

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `Join`: a replica that is out of data takes part with weight 0."""
        averager = self._averaging.averager
        if not pick(averager.average, {"weight": 0.0}):
            raise TypeError(f"{averager!r} takes no weights: it cannot go on without a replica")
        return _OutOfData(self)

    @property
    def join_device(self) -> torch.device:
        return self._averaging.everyone[0].device

    @property
    def join_process_group(self) -> Any:
        return getattr(self._averaging.recorder.world, "group", None)


class _OutOfData(JoinHook):
    """What a replica without data does at each step of the others: it goes along with weight 0."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer.zero_grad()
        if self.optimizer.averager.updates:
            self.optimizer._average_gradients(weight=0.0)
            self.optimizer.zero_grad()
        self.optimizer._average(weight=0.0)
