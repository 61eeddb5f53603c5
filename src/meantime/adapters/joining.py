"""Replicas with different amounts of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from meantime.adapters.averaging_optimizer import AveragingOptimizer


class OutOfData(JoinHook):
    """What a replica without data does at each step of the others: it goes along with weight 0."""

    def __init__(self, optimizer: AveragingOptimizer):
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer.zero_grad()
        if self.optimizer.averager.updates:
            self.optimizer._average_gradients(weight=0.0)
            self.optimizer.zero_grad()
        self.optimizer._average(weight=0.0)
