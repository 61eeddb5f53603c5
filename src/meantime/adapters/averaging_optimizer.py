"""Periodic averaging for a script that has a `torch.optim` optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime.keywords import pick
from meantime.replicas.base import Levels
from meantime.state import load_state_dict, state_dict
from meantime.transform import as_transform


class AveragingOptimizer(Optimizer):
    """Any `torch.optim` optimizer, with an averager run once after every step.

    To the rest of the script it is the optimizer inside: `param_groups`, `state` and `defaults`
    are that one's at all times, so learning rate schedulers, gradient scalers and checkpoints
    work as before. Parameters are written in place: their storage, strides, ties and views
    survive.

    Under a `torch.amp.GradScaler` a step whose gradients overflowed skips the inner optimizer
    but not the averager: the averaging schedule stays the same on every replica, whichever of
    them overflowed. All parameters that require gradients take part in the averaging, whether
    this replica has a gradient for them or not.

    Args:
        optimizer: the optimizer of the local steps.
        averager: what acts after each of them, for example
            `periodic(average_params(), every=8)` or a recipe around `identity()`. Its `update`
            is not used.
        replicas: who the other replicas are. Construction is collective: the parameters of the
            first replica are broadcast to all, as averaging presumes equal starts.

    Raises:
        TypeError: `optimizer` is not a `torch.optim.Optimizer`, or `averager` not a transform.

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import AveragingOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AveragingOptimizer(
        ...     torch.optim.AdamW(model.parameters(), lr=1e-3),
        ...     mt.periodic(mt.average_params(), every=8, after=100),
        ...     replicas=mt.Solo(),
        ... )
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.0005
    """

    # A gradient scaler then calls `step` on every replica, also where it found an overflow.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, averager: Any, *, replicas: Levels):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
        self.optimizer = optimizer
        self.averager = as_transform(averager)
        self.replicas = replicas
        # What `Optimizer.__init__` sets up, less parameter groups and state of its own.
        super().__setstate__({"defaults": optimizer.defaults})
        levels = replicas.values() if isinstance(replicas, Mapping) else [replicas]
        world = max(levels, key=lambda level: level.size)
        self._write(world.broadcast(self._parameters()))
        self.averager_state = self._fresh_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer, then run the averager.

        Args:
            closure: handed to the inner optimizer.

        Returns:
            What the inner optimizer's `step` returns; None if it was skipped.
        """
        result = None if self._overflowed() else self.optimizer.step(closure)
        self._average()
        return result

    def average_now(self) -> None:
        """Synchronise between steps: at the end of training, before an evaluation or a checkpoint.

        Collective. It counts as no step and moves no scheduled synchronisation.
        """
        self._average(now=True, **pick(self.averager.average, {"counts": False}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and to the averaging."""
        self.optimizer.add_param_group(param_group)
        fresh = self._fresh_state()
        kept = state_dict(self.averager_state)
        self.averager_state = load_state_dict(fresh, {**state_dict(fresh), **kept})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, and under `"averager"` the flat state of the averager.

        It holds this replica's state: resume every replica from its own to continue exactly.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = {**self.optimizer.state_dict(), "averager": state_dict(self.averager_state)}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state does not fit; nothing is loaded then.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            saved = before(self, saved) or saved
        if "averager" not in saved:
            raise ValueError(
                "this state dict has no averager state; to begin averaging from the checkpoint "
                "of a plain optimizer, load it into that before it is wrapped"
            )
        averager_state = load_state_dict(self.averager_state, saved.pop("averager"))
        self.optimizer.load_state_dict(saved)
        self.averager_state = averager_state
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, replicas={self.replicas!r})"

    def _parameters(self) -> list[Tensor]:
        """All that take part; the same on every replica, whoever has gradients."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _average(self, **extra: Any) -> None:
        parameters = self._parameters()
        averaged, self.averager_state = self.averager.average(
            parameters, self.averager_state, replicas=self.replicas, donate=True, **extra
        )
        if averaged is not parameters:
            self._write(averaged)

    @torch.no_grad()
    def _fresh_state(self) -> Any:
        return self.averager.init(self._parameters())

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            if value is not parameter:
                parameter.copy_(value)

    def _overflowed(self) -> bool:
        """Do what a gradient scaler leaves to this optimizer: unscale, and say what it found."""
        found = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return found is not None and bool(found)
