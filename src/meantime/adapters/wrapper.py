"""An optimizer around another one, with which a script can do all it can do with that one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])


def eagerly(function: F) -> F:
    """Run a function outside of the graph, where `torch.compile` is to compile its caller."""
    disabled: F = torch.compiler.disable(function)
    return disabled


_HOOKS = "_optimizer_"  # what the names of the dicts of hooks begin with


class OptimizerWrapper(Optimizer):
    """A `torch.optim.Optimizer` that is the optimizer inside, and does something after each step.

    `param_groups`, `state` and `defaults` are those of the optimizer inside at all times, and
    what it has besides (`train`, `eval`, ...) is found on the wrapper. Hooks, closures,
    pickle, deep copies, schedulers, gradient scalers and `torch.distributed.checkpoint` work as
    they do with a plain optimizer.

    A gradient scaler calls `step` also where it found an overflow: the optimizer inside is then
    skipped and what comes after the step is not, as the other replicas count on it.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer):
        _check(optimizer)
        self.optimizer = optimizer
        # What `Optimizer.__init__` sets up, less parameter groups and state of its own.
        super().__setstate__({})

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("optimizer", "found_inf", "grad_scale"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer inside, then do what this one is for.

        Args:
            closure: handed to the optimizer inside.

        Returns:
            What its `step` returns; None if it was skipped.
        """
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        if not before and not after:
            return self._step(closure)
        arguments: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        keywords: dict[str, Any] = {}
        for hook in before.values():
            arguments, keywords = hook(self, arguments, keywords) or (arguments, keywords)
        result = self._step(*arguments[1:], **keywords)
        for done in after.values():
            done(self, arguments, keywords)
        return result

    # `Optimizer` would run the hooks around it, and the global ones a second time.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        inner = self.optimizer
        accumulating = getattr(inner, "gradient_state", None)  # of `accelerate`
        if accumulating is not None and not accumulating.sync_gradients:
            return inner.step(closure)  # which does nothing between two updates
        if not inner.state and closure is None and _creating_state():
            return inner.step()
        result = None
        if self._ready(closure is not None):
            result = inner.step() if closure is None else inner.step(self._prepared(closure))
        self._after_step()
        return result

    def _ready(self, has_closure: bool) -> bool:
        """Do what a gradient scaler leaves to this optimizer. Whether to step at all."""
        found = self.__dict__.get("found_inf")
        scale = self.__dict__.get("grad_scale")
        if found is None and scale is None:
            return True
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return found is None or not bool(found)

    def _prepared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the optimizer inside."""
        return closure

    def _after_step(self) -> None:
        """What this optimizer is for."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @eagerly
    def state_dict(self) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._saved(self.optimizer.state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    @eagerly
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            saved = before(self, saved) or saved
        finish, inner = self._restored(saved)
        self.optimizer.load_state_dict(inner)
        finish()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _saved(self, inner: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the optimizer inside, with what this one adds."""
        return inner

    def _restored(self, saved: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
        """What loads the part of this optimizer, checked before, and the part of the inner one."""
        return lambda: None, saved

    def __getstate__(self) -> dict[str, Any]:
        # As with a plain optimizer, neither hooks nor a `step` that a scheduler put here.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.startswith(_HOOKS)
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _check(optimizer: Any) -> None:
    """Refuse what cannot make the local steps of one replica."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            "ZeroRedundancyOptimizer lets every rank step a share of the parameters with that "
            "rank's gradients alone: replicas with gradients of their own would be mixed without "
            "notice. Use the plain optimizer, or shard inside a replica with fully_shard"
        )


@eagerly
def _creating_state() -> bool:
    """Whether `torch.distributed.checkpoint` asks for the step, with zero gradients and learning
    rates, by which it has an optimizer create its state: no step of the training."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame is None or frame.f_code.co_name == "_init_optim_state":
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False
