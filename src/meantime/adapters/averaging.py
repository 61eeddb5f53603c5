"""An averager at work on the parameters of an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meantime.adapters.in_place import write
from meantime.adapters.packing import pack, unpack
from meantime.adapters.per_parameter import Place, places
from meantime.adapters.start import check_direction, check_parameters
from meantime.adapters.synchronisation import Recorder
from meantime.averaging import PeriodicState, TrajectoryState, average_params, averaged_params
from meantime.keywords import CONTRACT, pick
from meantime.replicas.base import Levels
from meantime.state import find_all, leaves_equal, load_state_dict, state_dict
from meantime.transform import as_transform

COMMON = -1  # the replica of a state that is the same on all

_requires_grad = operator.attrgetter("requires_grad")


class Averaging:
    """Runs a transform on what requires gradients among an optimizer's parameters, in place.

    The tree it acts on is the list of all parameters, with `None` for those that are frozen: a
    parameter keeps its place in the state whatever happens to others.

    Attributes:
        averager: the transform.
        state: its state.
        recorder: the replicas.
        steps: the local steps made.
        equal: whether the parameters are those of all replicas.
    """

    def __init__(self, optimizer: Optimizer, averager: Any, replicas: Levels):
        self.optimizer = optimizer
        self.averager = as_transform(averager)
        self.recorder = Recorder(replicas)
        self.steps, self.equal = 0, True
        self.admit()
        check_direction(self.averager, self._tree, replicas, optimizer)

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
        if extra.get("counts", True):
            self.steps += 1
            self.equal = False
        if self.recorder.communicated:
            self.equal = self.recorder.globally and self._together(extra.get("now", False))
        return self.recorder.communicated

    def _together(self, now: bool) -> bool:
        """Whether all replicas have the same parameters after a synchronisation of all, which was
        forced or not."""
        rounds = find_all(self.state, PeriodicState)
        ended = now or all(bool(r.count == r.start) for r in rounds)
        return ended and leaves_equal(self.state, now)

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
    def show_means(self) -> None:
        """Set the parameters to the means of all replicas: of their averages along the trajectory
        where the averager keeps some, else of what the parameters are."""
        parameters = self.tree
        values = parameters
        if find_all(self.state, TrajectoryState):
            values = averaged_params(self.state, parameters)
        means = average_params()
        values, _ = means.average(values, means.init(values), replicas=self.recorder.world)
        write(parameters, values)

    def saved(self, inner: dict[str, Any]) -> dict[str, Any]:
        """The state dict of the optimizer, with the state, the steps and whose state it is."""
        common = self.equal or self.warming_up
        flat = {
            **state_dict(self.state),
            "steps": torch.tensor(self.steps),
            "replica": torch.tensor(COMMON if common else int(self.recorder.world.rank)),
        }
        return pack(inner, flat, self._places)

    def restored(self, saved: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
        """What loads what `saved` added, checked before, and the state dict without it."""
        inner, flat = unpack(saved, self._places)
        if "steps" not in flat:
            raise ValueError(
                "this state dict has no averager state; to begin averaging from the checkpoint "
                "of a plain optimizer, load it into that before it is wrapped"
            )
        steps, replica = int(flat.pop("steps")), int(flat.pop("replica"))
        rank = int(self.recorder.world.rank)
        if replica not in (COMMON, rank):
            raise ValueError(
                f"this is the state of replica {replica} in the middle of a round, and this is "
                f"replica {rank}: save and load every replica's own state, call average_now() "
                "before saving, or pass of_any_replica=True to go on from it"
            )
        state = load_state_dict(self.state, flat)

        def finish() -> None:
            self.state, self.steps, self.equal = state, steps, replica == COMMON

        return finish, inner

    @property
    def _places(self) -> dict[str, Place]:
        return places(self.state, len(self.everyone))
