"""An averager at work on the parameters of an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime.adapters.in_place import write
from meantime.adapters.start import check_parameters
from meantime.adapters.synchronisation import Recorder
from meantime.averaging import (
    DelayedState,
    EagerState,
    ElasticState,
    GossipState,
    NoLoCoState,
    OverlappedState,
    PeriodicState,
    PushSumState,
)
from meantime.keywords import CONTRACT, keywords, pick
from meantime.replicas import Solo
from meantime.replicas.base import Levels
from meantime.state import find_all, load_state_dict, state_dict
from meantime.transform import as_transform
from meantime.tree import vdot

# The states of what leaves replicas apart, and of what makes them equal only when that is forced.
_APART = (EagerState,)
_FORCED = (DelayedState, ElasticState, GossipState, NoLoCoState, OverlappedState, PushSumState)
_requires_grad = operator.attrgetter("requires_grad")


class Averaging:
    """Runs a transform on what requires gradients among an optimizer's parameters, in place.

    The tree it acts on is the list of all parameters, with `None` for those that are frozen: a
    parameter keeps its place in the state whatever happens to others.

    Attributes:
        averager: the transform.
        state: its state.
        recorder: the replicas.
    """

    def __init__(self, optimizer: Optimizer, averager: Any, replicas: Levels):
        self.optimizer = optimizer
        self.averager = as_transform(averager)
        self.recorder = Recorder(replicas)
        self.admit()
        self._check_direction()

    def admit(self) -> None:
        """Look again who takes part, with a new state."""
        self.everyone = [p for group in self.optimizer.param_groups for p in group["params"]]
        check_parameters(self.everyone)
        self._mask = list(map(_requires_grad, self.everyone))
        self._tree = [p if p.requires_grad else None for p in self.everyone]
        self.state = self._fresh_state()

    def readmit(self) -> None:
        """Look again who takes part; what is known of those who did is kept."""
        known = state_dict(self.state)
        self.admit()
        fresh = state_dict(self.state)
        kept = {name: value for name, value in known.items() if name in fresh}
        self.state = load_state_dict(self.state, {**fresh, **kept})

    @torch.no_grad()
    def _fresh_state(self) -> Any:
        return self.averager.init(self._tree)

    @property
    def tree(self) -> list[Tensor | None]:
        """Those who take part, in the places of all."""
        # Asked for at every step: this runs in C.
        if list(map(_requires_grad, self.everyone)) != self._mask:
            self.readmit()
        return self._tree

    @property
    def parameters(self) -> list[Tensor]:
        """Those who take part."""
        return [p for p in self.tree if p is not None]

    def check(self, extra: dict[str, Any]) -> None:
        """Refuse extra arguments of a step that the averager does not name."""
        for name in extra:
            given = {name: extra[name]}
            named = pick(self.averager.average, given) or pick(self.averager.update, given)
            if not named or name in CONTRACT | {"counts", "step"}:
                raise TypeError(f"step: {self.averager!r} takes no {name!r}")

    @property
    def warming_up(self) -> bool:
        rounds = find_all(self.state, PeriodicState)
        return any(bool(r.count < r.start) for r in rounds)

    def equal_after(self, now: bool) -> bool:
        """Whether all replicas have the same parameters after the last synchronisation of all,
        which was forced or not."""
        kinds: tuple[type, ...] = _APART if now else (*_APART, *_FORCED)
        if any(find_all(self.state, kind) for kind in kinds):
            return False
        return now or all(bool(r.count == r.start) for r in find_all(self.state, PeriodicState))

    def average(self, **extra: Any) -> bool:
        """`average` the parameters; whether that communicated, as the recorder has it."""
        parameters = self.tree
        averaged, self.state = self.averager.average(
            *(parameters, self.state),
            replicas=self.recorder.levels,
            donate=True,
            **pick(self.averager.average, extra),
        )
        if averaged is not parameters:
            write(parameters, averaged)
        return self.recorder.communicated

    def update_gradients(self, **extra: Any) -> bool:
        """`update` the gradients; whether that communicated. A parameter without a gradient has
        zeros, and gets one only if the replicas have a mean of it."""
        parameters = self.tree
        gradients = [
            None if p is None else torch.zeros_like(p) if p.grad is None else p.grad
            for p in parameters
        ]
        updates, self.state = self.averager.update(
            *(gradients, self.state, parameters),
            replicas=self.recorder.levels,
            donate=True,
            **pick(self.averager.update, extra),
        )
        communicated = self.recorder.communicated
        self.recorder.clear()
        for p, gradient in zip(parameters, updates, strict=True):
            if p is None or gradient is p.grad:
                continue
            if p.grad is not None:
                p.grad.copy_(gradient)
            elif communicated:
                p.grad = gradient
        return communicated

    @torch.no_grad()
    def _check_direction(self) -> None:
        """Refuse a transform that makes steps of gradients, by what it makes of ones."""
        if not self.averager.updates:
            return
        ones = [
            None if p is None else torch.ones((1,) * p.ndim, dtype=p.dtype, device=p.device)
            for p in self._tree
        ]
        levels = self.recorder.levels
        alone = {name: Solo() for name in levels} if isinstance(levels, Mapping) else Solo()
        state = self.averager.init(ones)
        try:
            updates, _ = self.averager.update(ones, state, ones, replicas=alone)
        except TypeError:
            if (keywords(self.averager.update) or CONTRACT) <= CONTRACT | {"weight"}:
                raise
            return  # it may need arguments which only a step has
        if float(vdot(ones, updates).real) < 0:
            raise ValueError(
                f"{self.averager!r} turns gradients into steps, but here the steps are made by "
                f"{type(self.optimizer).__name__}: give the recipe identity() for its inner one"
            )
