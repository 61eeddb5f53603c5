"""An optimizer with a model averager: `torch.distributed.optim.PostLocalSGDOptimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from meantime.adapters.dropin.averagers import ModelAverager
from meantime.adapters.wrapper import OptimizerWrapper
from meantime.schedules import check_integer


class PostLocalSGDOptimizer(OptimizerWrapper):
    """Any `torch.optim` optimizer, with a model averager called after every step.

    To the rest of the script it is the optimizer inside, like `AveragingOptimizer`. The averager
    is also called where a gradient scaler skipped the step, so that all replicas call it equally
    often.

    Its state dict is that of the optimizer inside with an entry `"step"`, the number of calls of
    the averager: torch's class loads it, and it loads torch's.

    Args:
        optim: the optimizer of the local steps.
        averager: a `PeriodicModelAverager` or `HierarchicalModelAverager` of this module. Other
            algorithms are averagers of an `AveragingOptimizer`.

    Raises:
        TypeError: `optim` is not a `torch.optim.Optimizer` or shards its state over the replicas,
            or `averager` is something else.

    Lin et al. 2020 (https://arxiv.org/abs/1808.07217), section 3.

    Example:
        >>> import torch
        >>> from meantime.adapters.dropin import PeriodicModelAverager, PostLocalSGDOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = PostLocalSGDOptimizer(
        ...     optim=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     averager=PeriodicModelAverager(period=4, warmup_steps=100),
        ... )
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["step"]
        1
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager):
        super().__init__(optim)
        if not isinstance(averager, ModelAverager):
            raise TypeError(
                "averager must be a PeriodicModelAverager or HierarchicalModelAverager of "
                f"meantime.adapters.dropin, got {averager!r}; for other algorithms use "
                "meantime.adapters.AveragingOptimizer"
            )
        self.averager = averager

    @property
    def optim(self) -> Optimizer:
        """The optimizer inside."""
        return self.optimizer

    def _after_step(self) -> None:
        self.averager.average_parameters(self.param_groups)

    def _saved(self, inner: dict[str, Any]) -> dict[str, Any]:
        return {**inner, "step": self.averager.step_of(self.param_groups)}

    def _restored(self, saved: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
        if "step" not in saved:
            warnings.warn(
                "the state dict does not contain a step counter of an averager: it starts at 0, "
                "with a new warm-up",
                stacklevel=4,
            )
        step = check_integer("the step of a state dict", saved.pop("step", 0), 0)
        return lambda: self.averager.set_step_of(self.param_groups, step), saved
