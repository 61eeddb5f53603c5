"""Any transform as an optimizer of `torch.optim`."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime import tree
from meantime.adapters.in_place import write
from meantime.adapters.per_parameter import Layout, layout, new_entries, restored_entries
from meantime.transform import Transform, as_transform, step


class _Rule(NamedTuple):
    """What a parameter group is stepped with: the transform made of these hyperparameters, the
    layout of its state for the first parameter, and for the lists of parameters stepped of late."""

    hyperparameters: dict[str, Any]
    transform: Transform
    form: Layout
    layouts: dict[tuple[int, ...], Layout]

    def layout_of(self, parameters: list[Tensor]) -> Layout:
        key = tuple(map(id, parameters))
        if key not in self.layouts:
            if len(self.layouts) > 8:  # which parameters have gradients changes all the time
                self.layouts.clear()
            self.layouts[key] = layout(self.transform, parameters)
        return self.layouts[key]


class TransformOptimizer(Optimizer):
    """A transform as a `torch.optim` optimizer.

    For each parameter group the transform is made of the hyperparameters of that group, and made
    anew when they change: learning rate schedulers drive it. Parameters are written in place:
    their storage, strides and ties survive.

    The state is kept as other optimizers keep theirs, in a dict for each parameter: what the
    transform keeps in the shape of the parameters, and what they share (a counter, say). A
    parameter without a gradient is skipped, and its state stays: its counter falls behind.
    Parameters whose counters differ are stepped apart from each other.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer.
        make: a function of hyperparameters that returns a transform which acts in `update`. What
            it has defaults for are hyperparameters too. For the optimizer to be pickled it is
            defined in a module.
        hyperparameters: their values for groups that have none of their own, as `make` names
            them; schedulers look for `lr`.

    The transform sees those parameters of one group that are stepped together, as a list:
    `clip_by_global_norm` clips each group by a norm of its own, and masks and labels are functions
    of the parameters.

    Raises:
        TypeError: `make` does not take these hyperparameters, or returns no transform or one that
            acts in `average` (an `AveragingOptimizer` around this optimizer runs it instead).

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import TransformOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = TransformOptimizer(
        ...     model.parameters(),
        ...     lambda lr, weight_decay: mt.adamw(lr, weight_decay=weight_decay),
        ...     lr=1e-3,
        ...     weight_decay=0.01,
        ... )
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> sorted(optimizer.state[model.weight])
        ['0.count', '0.mu', '0.nu', '1.count']
    """

    def __init__(self, params: Iterable[Any], make: Callable[..., Any], **hyperparameters: Any):
        self.make = make
        self._rules: dict[int, _Rule] = {}
        named = inspect.signature(make).parameters.values()
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        # A group has more keys than `make` takes: "params", and what schedulers put there.
        self._names = {p.name for p in named} | {*hyperparameters}
        super().__init__(params, {**defaults, **hyperparameters})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient.

        Args:
            closure: evaluates the loss and its gradients, and returns the loss.

        Returns:
            What the closure returned; None without one.

        Raises:
            ValueError: hyperparameters were changed such that the state has another structure.
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for i, group in enumerate(self.param_groups):  # all errors before the first write
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.layout is not torch.strided for p in parameters):
                raise RuntimeError("TransformOptimizer takes no sparse gradients")
            if parameters:
                work.append((self._rule(i), parameters))
        with torch.no_grad():
            for rule, parameters in work:
                self._step(rule, parameters)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._made({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state does not fit the transforms; nothing is loaded then.
        """

        # `Optimizer` would cast tensors to the dtype of the parameters, counters too.
        def hide(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            hidden = {k: optree.tree_map(_Hidden, v) for k, v in saved["state"].items()}
            return {**saved, "state": hidden}

        last = self.register_load_state_dict_pre_hook(hide)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "make": self.make, "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "make" not in state:  # what `load_state_dict` found
            state = {**state, "state": self._restored(**state)}
        super().__setstate__({**state, "_rules": {}})

    def _step(self, rule: _Rule, parameters: list[Tensor]) -> None:
        tx, kept = rule.transform, rule.layout_of(parameters)
        if kept.names:
            for parameter in parameters:
                if parameter not in self.state:
                    self.state[parameter] = new_entries(tx, parameter)
        rows = {p: self.state.get(p, {}) for p in parameters}
        for alike in kept.alike(rows):
            entries = [rows[p] for p in alike]
            own = rule.layout_of(alike)
            grads = [p.grad for p in alike]
            values, state = step(tx, grads, alike, own.join(entries), donate=True)
            write(alike, values)
            own.split(state, entries)

    def _rule(self, i: int) -> _Rule:
        """That of the i-th group for its present hyperparameters."""
        group, rule = self.param_groups[i], self._rules.get(i)
        values = self._hyperparameters(group)
        if rule is not None and rule.hyperparameters == values:
            return rule
        tx = self._made(group)
        form = layout(tx, group["params"][:1])
        same = rule is not None and rule.form == form
        if rule is not None and not same and any(p in self.state for p in group["params"]):
            raise ValueError(
                f"with the hyperparameters {values} the state of parameter group {i} would be "
                f"{list(form.names)}, but it is {list(rule.form.names)}: change only values that "
                "keep its form, or make a new optimizer"
            )
        self._rules[i] = _Rule(values, tx, form, rule.layouts if rule is not None and same else {})
        return self._rules[i]

    def _made(self, group: dict[str, Any]) -> Transform:
        tx = as_transform(self.make(**self._hyperparameters(group)))
        if tx.averages:
            raise TypeError(
                f"{tx!r} acts in `average`, which a TransformOptimizer does not call: let `make` "
                "return the inner optimizer and put an AveragingOptimizer around this one"
            )
        return tx

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """What `make` takes of a group; tensors, which schedulers write to, as numbers."""
        return {
            name: value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
            for name, value in group.items()
            if name in self._names
        }

    def _restored(self, state: dict[Any, Any], param_groups: list[dict[str, Any]]) -> Any:
        """Loaded entries, if they are those that the transforms keep."""
        restored = defaultdict(dict, {k: tree.map(lambda x: x.value, v) for k, v in state.items()})
        for i, group in enumerate(param_groups):
            missing = sorted((self._names & self.defaults.keys()) - group.keys())
            if missing:
                raise ValueError(
                    f"parameter group {i} of the saved state has no {missing}: it is that of "
                    "another optimizer"
                )
            tx = self._made(group)
            for j, parameter in enumerate(group["params"]):
                if parameter in restored:
                    try:
                        restored[parameter] = restored_entries(tx, parameter, restored[parameter])
                    except ValueError as error:
                        raise ValueError(f"parameter {j} of group {i}: {error}") from None
        return restored


class _Hidden:
    """A value that is not seen as a tensor."""

    def __init__(self, value: Any):
        self.value = value
