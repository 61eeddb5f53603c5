"""Any optimizer of `torch.optim` as a transform."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime import tree
from meantime._foreach import transforming
from meantime.adapters.wrapper import eagerly
from meantime.arrays import Array
from meantime.control import counter, increment
from meantime.made import made
from meantime.schedules import value_at
from meantime.transform import Transform
from meantime.tree import Tree

Slots = dict[str, Tensor]


class TorchState(NamedTuple):
    """Updates made (0-d int32), and what the optimizer keeps: shaped like the parameters, with a
    dict of tensors for each of them (zeros before the first update)."""

    count: Array
    slots: Tree


@made
def from_torch(optimizer_class: type[Optimizer], **hyperparameters: Any) -> Transform:
    r"""A `torch.optim` optimizer as a transform: :math:`u = \theta_{\text{stepped}} - \theta`.

    It steps copies of the parameters, so that it can be an inner or an outer optimizer, and
    takes part in checkpoints like any other transform. With `meantime.step` the parameters are
    those of the optimizer bit for bit.

    Args:
        optimizer_class: a class of `torch.optim`, or another subclass of `torch.optim.Optimizer`
            whose state is a dict of tensors for each parameter.
        hyperparameters: its keyword arguments. `lr` may be a schedule of the number of updates.

    Parameters are torch tensors. Each update builds the optimizer anew and runs eagerly: a break
    of the graph in `torch.compile`.

    Raises:
        TypeError: `optimizer_class` is none or its `step` needs a closure, as that of `LBFGS`,
            which evaluates the loss several times a step; its state is not made of tensors;
            a parameter is not a floating torch tensor.
        RuntimeError: it is called inside of a `torch.func` transform such as `vmap`.
        ValueError: what the optimizer itself raises for its hyperparameters.

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import from_torch
        >>> nesterov = from_torch(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        >>> tx = mt.chain(
        ...     from_torch(torch.optim.NAdam, lr=1e-3),
        ...     mt.periodic(mt.outer(mt.chain(mt.mean(), nesterov)), every=500),
        ... )
        >>> params = {"w": torch.ones(2)}
        >>> params, state = mt.step(tx, params, params, tx.init(params), replicas=mt.Solo())
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "from_torch takes a class and its hyperparameters, from_torch(torch.optim.SGD, lr=0.1) "
            f"for example; got an object of type {type(optimizer_class).__name__}"
        )
    name = f"from_torch({optimizer_class.__name__})"
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"{name}: its step needs a closure that evaluates the loss again, but `update` is "
            "given one gradient"
        )

    def build(params: list[Tensor], count: Array) -> Optimizer:
        chosen = dict(hyperparameters)
        if callable(chosen.get("lr")):
            chosen["lr"] = float(value_at(chosen["lr"], count))
        return optimizer_class(params, **chosen)

    # Hyperparameters out of range are found here; every optimizer takes a matrix.
    build([torch.zeros(1, 1)], torch.tensor(0))

    def run(
        params: list[Tensor], grads: list[Tensor], count: Array, slots: list[Slots]
    ) -> list[Slots]:
        """Step parameters and slots in place, without slots as a new optimizer. The slots."""
        optimizer = build(params, count)
        for parameter, grad, kept in zip(params, grads, slots, strict=True):
            parameter.grad = grad
            if kept:
                optimizer.state[parameter] = kept
        (before,) = (dict(group) for group in optimizer.param_groups)
        optimizer.step()
        (after,) = optimizer.param_groups
        changed = [key for key in after if key not in before or after[key] is not before[key]]
        if changed:
            raise TypeError(f"{name} keeps {changed} in its parameter groups, not in its state")
        return [optimizer.state.get(parameter, {}) for parameter in params]

    def template(leaf: Tensor) -> Slots:
        """The slots of a parameter, which optimizers make in their first step; zeros."""
        like = leaf.detach()
        zeros = [torch.zeros_like(like)], [torch.zeros_like(like)]
        (slots,) = run(*zeros, torch.tensor(0), [{}])
        for key, value in slots.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} keeps {key!r} = {value!r} in its state, not a tensor")
        return {key: torch.zeros_like(value) for key, value in slots.items()}

    def init(params: Tree) -> TorchState:
        _check_leaves(params, name)
        return TorchState(counter(params), tree.map(template, params))

    @torch.no_grad()
    def stepped(
        updates: Tree, state: TorchState, params: Tree, in_place: bool, donate: bool
    ) -> tuple[Tree, TorchState]:
        _check_leaves(params, name)
        flat, spec = tree.flatten(params)
        if not flat:
            return params, state
        stepping = [x.detach() if in_place else x.detach().clone() for x in flat]
        given, kept = (list[Any](spec.flatten_up_to(t)) for t in (updates, state.slots))
        grads = [_like(x, p) for x, p in zip(given, stepping, strict=True)]
        slots: list[Slots] = [{} for _ in kept]
        if state.count > 0:
            slots = [{k: v if donate else v.clone() for k, v in row.items()} for row in kept]
        slots = run(stepping, grads, state.count, slots)
        for old, new in zip(kept, slots, strict=True):
            if old.keys() != new.keys():
                raise TypeError(f"{name} changed its state from {[*old]} to {[*new]}")
        following = TorchState(increment(state.count), spec.unflatten(slots))
        return params if in_place else spec.unflatten(stepping), following

    def update(
        updates: Tree, state: TorchState, params: Tree = None, *, donate: bool = False
    ) -> tuple[Tree, TorchState]:
        if params is None:
            raise ValueError(f"{name} needs the parameters: call update(grads, state, params)")
        new, state = stepped(updates, state, params, in_place=False, donate=donate)
        return tree.map(lambda u, a, b: (a - b).to(u.dtype), updates, new, params), state

    def apply(
        updates: Tree, state: TorchState, params: Tree, *, donate: bool = False, **extra: Any
    ) -> tuple[Tree, TorchState]:
        return stepped(updates, state, params, in_place=donate, donate=donate)

    # Under `torch.compile` these are breaks of the graph: what is built in them is no constant.
    init, stepped = eagerly(init), eagerly(stepped)
    tx = Transform(init, update)
    tx.update.apply = apply  # type: ignore[attr-defined]
    return tx


def _like(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, which fused kernels take for granted."""
    if grad.stride() == parameter.stride():
        return grad.detach()
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def _check_leaves(params: Tree, name: str) -> None:
    if transforming():
        raise RuntimeError(
            f"{name} cannot run inside of torch.func transforms such as vmap: an optimizer of "
            "torch.optim writes to its parameters. Take one of meantime's own for simulated "
            "replicas, or replicas of torch.distributed"
        )
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"{name} steps floating torch tensors, {path or 'the leaf'} is {kind}")
