"""Periodic averaging for a script that has a `torch.optim` optimizer."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from meantime.adapters.companions import (
    average_finite,
    optimizer_tensors,
    persistent_buffers,
)
from meantime.adapters.joining import OutOfData
from meantime.adapters.packing import pack, unpack
from meantime.adapters.start import check_choice, check_optimizer, check_parameters, equal_start
from meantime.adapters.synchronisation import Recorder, Synchronisation
from meantime.adapters.wrapper import OptimizerWrapper
from meantime.averaging import OuterState, PeriodicState, average_params
from meantime.keywords import pick
from meantime.replicas.base import Levels, Replicas
from meantime.state import find_all, load_state_dict, state_dict
from meantime.transform import as_transform
from meantime.tree import vdot

_LOGGER = logging.getLogger("meantime")
_COMMON = -1  # the replica of a state that is the same on all
_requires_grad = operator.attrgetter("requires_grad")


class AveragingOptimizer(OptimizerWrapper, Joinable):
    """Any `torch.optim` optimizer, with an averager run once after every step.

    To the rest of the script it is the optimizer inside: `param_groups`, `state` and `defaults`
    are that one's at all times, so learning rate schedulers, gradient scalers, closures, hooks
    and checkpoints work as before. Parameters are written in place: their storage, strides, ties
    and views survive.

    All parameters that require gradients take part in the averaging, whether this replica has a
    gradient for them or not. Under a `torch.amp.GradScaler` a step whose gradients overflowed
    skips the optimizer inside but not the averager: the schedule stays the same on all replicas.

    An averager may act on gradients too: that of `post_local_sgd(identity(), every=8,
    warmup=100)` averages them during the warm-up, so that a plain module trains as
    `DistributedDataParallel` would there. (With that one, use `post_local_hook` instead.)

    Args:
        optimizer: the optimizer of the local steps.
        averager: what acts after each of them, for example
            `periodic(average_params(), every=8)` or a recipe around `identity()`.
        replicas: who the other replicas are; construction is collective over them.
        model: the model, if its buffers (the statistics of BatchNorm, say) are to take part.
        buffers: what happens to persistent buffers at a synchronisation: `"mean"` (integers take
            the maximum), `"broadcast"` from replica 0, or `"ignore"`.
        optimizer_state: what happens to the state of the optimizer inside at a
            synchronisation: `"keep"` it, `"average"` what is shaped like a parameter (moments, no
            counters), or `"reset"` it.
        start: averaging presumes equal starts: `"broadcast"` parameters and buffers from
            replica 0, or only `"check"` that they are equal.
        arena: move the parameters into one buffer first, so that means need no packing; see
            `meantime.adapters.arena`.
        on_synchronisation: called with a `Synchronisation` after each one. Its drift and
            pseudo-gradient norm are measured for the callback; that takes the memory of one
            more model at each synchronisation.

    Every synchronisation is also logged by `logging.getLogger("meantime")`, at level INFO.

    Raises:
        TypeError: `optimizer` is not a `torch.optim.Optimizer` or one that shards its state over
            the replicas, `averager` is not a transform, or a parameter has no values yet.
        ValueError: an unknown choice; replicas that differ in averager, parameters, or (with
            `start="check"`) values, on all replicas.

    Example:
        >>> import torch, meantime as mt
        >>> from meantime.adapters import AveragingOptimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AveragingOptimizer(
        ...     torch.optim.AdamW(model.parameters(), lr=1e-3),
        ...     mt.periodic(mt.average_params(), every=8, after=100),
        ...     replicas=mt.Solo(),
        ...     model=model,
        ... )
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.0005
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averager: Any,
        *,
        replicas: Levels,
        model: torch.nn.Module | None = None,
        buffers: Literal["mean", "broadcast", "ignore"] = "mean",
        optimizer_state: Literal["keep", "average", "reset"] = "keep",
        start: Literal["broadcast", "check"] = "broadcast",
        arena: bool = False,
        on_synchronisation: Callable[[Synchronisation], None] | None = None,
    ):
        check_optimizer(optimizer)
        check_choice("buffers", buffers, ("mean", "broadcast", "ignore"))
        check_choice("optimizer_state", optimizer_state, ("keep", "average", "reset"))
        check_choice("start", start, ("broadcast", "check"))
        OptimizerWrapper.__init__(self, optimizer)
        Joinable.__init__(self)
        self.averager = as_transform(averager)
        self.replicas = replicas
        self.on_synchronisation = on_synchronisation
        self.last_synchronisation: Synchronisation | None = None
        self._recorder = Recorder(replicas)
        self._buffers = [] if model is None or buffers == "ignore" else persistent_buffers(model)
        self._policies = (buffers, optimizer_state)
        self._steps = 0
        self._equal = True  # whether the parameters are those of all replicas
        self._shown = False  # whether they stand aside for averaged ones
        self._checked = not self.averager.updates
        check_parameters(self._everyone())
        if arena:
            from meantime.adapters.arena import arena as gather_in_arena

            gather_in_arena([p for p in self._everyone() if p.requires_grad])
        self._admit()
        equal_start(self.averager, self._tree, self._buffers, self._recorder.world, start)
        self.averager_state = self._fresh_state()

    # --- steps ---------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._shown:
            raise RuntimeError("leave averaged_parameters() before the next step")
        if self._join_config.enable:
            Join.notify_join_context(self)
        return super()._step(closure)

    def _ready(self, has_closure: bool) -> bool:
        ready = super()._ready(has_closure)
        if has_closure or not self.averager.updates:
            return ready
        if self._average_gradients() and "found_inf" in self.__dict__:
            # Those whose gradients overflowed took no part, and step with the mean of the others.
            return any(bool(p.grad.any()) for p in self._tree if p is not None and p.grad is not None)
        return ready

    def _prepared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if not self.averager.updates:
            return closure

        def averaged() -> Any:
            loss = closure()
            self._average_gradients()
            return loss

        return averaged

    def _after_step(self) -> None:
        self._average()

    def average_now(self) -> None:
        """Synchronise between steps: at the end of training, before an evaluation or a checkpoint.

        Collective. It counts as no step and moves no scheduled synchronisation.
        """
        self._average(now=True, **pick(self.averager.average, {"counts": False}))

    @property
    def warming_up(self) -> bool:
        """Whether the next step belongs to the warm-up (`after`) of a `periodic` averager."""
        rounds = find_all(self.averager_state, PeriodicState)
        return any(bool(r.count < r.start) for r in rounds)

    @torch.no_grad()
    def _average(self, **extra: Any) -> None:
        began = time.perf_counter()
        recorder, parameters = self._recorder, self._participants()
        recorder.measure(self.on_synchronisation is not None)
        averaged, self.averager_state = self.averager.average(
            parameters, self.averager_state, replicas=recorder.levels, donate=True, **extra
        )
        if averaged is not parameters:
            _write(parameters, averaged)
        if extra.get("counts", True):
            self._steps += 1
            self._equal = False
        if recorder.communicated:
            self._synchronised(began, extra)

    def _synchronised(self, began: float, extra: dict[str, Any]) -> None:
        """What comes after a synchronisation of the parameters."""
        recorder = self._recorder
        rounds = find_all(self.averager_state, PeriodicState)
        over = extra.get("now", False) or all(bool(r.count == r.start) for r in rounds)
        self._equal = recorder.globally and over
        recorder.measure(False)
        self._synchronise_companions(recorder.reached, extra.get("weight"))
        outer = bool(find_all(self.averager_state, OuterState))
        done = recorder.summary(self._steps, time.perf_counter() - began, outer)
        recorder.clear()
        self.last_synchronisation = done
        _LOGGER.info("%s", done)
        if self.on_synchronisation is not None:
            self.on_synchronisation(done)

    def _synchronise_companions(self, world: Replicas, weight: Any) -> None:
        buffers, optimizer_state = self._policies
        if buffers == "broadcast" and self._buffers:
            _write(self._buffers, world.broadcast(self._buffers))
        elif buffers == "mean":
            average_finite(self._buffers, world, weight)
        if optimizer_state == "average":
            average_finite(optimizer_tensors(self.optimizer, self._tree), world, weight)
        elif optimizer_state == "reset":
            for parameter in self._tree:
                self.state.pop(parameter, None)

    @torch.no_grad()
    def _average_gradients(self, **extra: Any) -> bool:
        """Run the averager's `update` on the gradients; whether it communicated."""
        parameters = self._participants()
        gradients = [
            None if p is None else torch.zeros_like(p) if p.grad is None else p.grad
            for p in parameters
        ]
        before = None if self._checked else [None if g is None else g.clone() for g in gradients]
        updates, self.averager_state = self.averager.update(
            *(gradients, self.averager_state, parameters),
            replicas=self._recorder.levels,
            donate=True,
            **extra,
        )
        communicated = self._recorder.communicated
        self._recorder.clear()
        if before is not None and not communicated:
            self._check_direction(before, updates)
        for p, gradient in zip(parameters, updates, strict=True):
            if p is None or gradient is p.grad:
                continue
            if p.grad is not None:
                p.grad.copy_(gradient)
            elif communicated:
                p.grad = gradient
        return communicated

    def _check_direction(self, gradients: list[Any], updates: list[Any]) -> None:
        if float(vdot(gradients, updates).real) < 0:
            raise ValueError(
                f"{self.averager!r} turns gradients into steps, but here the steps are made by "
                f"{type(self.optimizer).__name__}: give the recipe identity() for its inner one"
            )
        self._checked = True

    # --- who takes part ------------------------------------------------------------------------

    def _everyone(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _participants(self) -> list[Tensor | None]:
        """The parameters of all groups, None for those that are frozen."""
        if list(map(_requires_grad, self._all)) != self._mask:
            self._readmit()
        return self._tree

    def _admit(self) -> None:
        self._all = self._everyone()
        self._mask = list(map(_requires_grad, self._all))
        self._tree = [p if p.requires_grad else None for p in self._all]

    def _readmit(self) -> None:
        """Make room in the averager's state for parameters that are new or no longer frozen."""
        self._admit()
        fresh = state_dict(self._fresh_state())
        kept = {k: v for k, v in state_dict(self.averager_state).items() if k in fresh}
        self.averager_state = load_state_dict(self._fresh_state(), {**fresh, **kept})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside and to the averaging. Collective: their values
        become those of replica 0."""
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        check_parameters(new)
        _write(new, self._recorder.world.broadcast(new))
        self._readmit()

    @torch.no_grad()
    def _fresh_state(self) -> Any:
        return self.averager.init(self._tree)

    # --- evaluation ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Show the mean over the replicas, and put this replica's own values back afterwards.

        Inside the context the parameters and the buffers hold their means over all replicas (of
        the trajectory averages, where the averager keeps such: `ema`, `swa`, `lawa`), for an
        evaluation or a checkpoint of the averaged model. Afterwards everything is what it was,
        bit for bit. Collective.
        """
        own = [*(p for p in self._participants() if p is not None), *self._buffers]
        with torch.no_grad():
            saved = [x.clone() for x in own]
            means = self._shown_values()
            _write(own, means)
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            _write(own, saved)

    def _shown_values(self) -> list[Tensor]:
        parameters = [p for p in self._tree if p is not None]
        averager = average_params()
        world = self._recorder.world
        values, _ = averager.average(parameters, averager.init(parameters), replicas=world)
        buffers = [x.clone() for x in self._buffers]
        average_finite(buffers, world)
        return [*values, *buffers]

    # --- checkpoints ---------------------------------------------------------------------------

    def _saved(self, inner: dict[str, Any]) -> dict[str, Any]:
        common = self._equal or self.warming_up
        flat = {
            **state_dict(self.averager_state),
            "steps": torch.tensor(self._steps),
            "replica": torch.tensor(_COMMON if common else int(self._recorder.world.rank)),
        }
        return pack(inner, flat, self._all)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, of_any_replica: bool = False
    ) -> None:
        """Restore what `state_dict` returned.

        A state saved in the middle of a round is that of one replica. Resume every replica from
        its own to continue exactly, or save after `average_now()`.

        Args:
            state_dict: the state.
            of_any_replica: whether to accept that of another replica in the middle of a round,
                which loses what this one did since the last synchronisation.

        Raises:
            ValueError: the state does not fit, or belongs to another replica; nothing is
                loaded then.
        """
        self._of_any_replica = of_any_replica
        super().load_state_dict(state_dict)

    def _restored(self, saved: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
        inner, flat = unpack(saved)
        if not flat:
            raise ValueError(
                "this state dict has no averager state; to begin averaging from the checkpoint "
                "of a plain optimizer, load it into that before it is wrapped"
            )
        steps, replica = int(flat.pop("steps")), int(flat.pop("replica"))
        rank = int(self._recorder.world.rank)
        if replica not in (_COMMON, rank) and not self._of_any_replica:
            raise ValueError(
                f"this is the state of replica {replica} in the middle of a round, and this is "
                f"replica {rank}: save and load every replica's own state, call average_now() "
                "before saving, or pass of_any_replica=True to go on from it"
            )
        state = load_state_dict(self.averager_state, flat)

        def finish() -> None:
            self.averager_state, self._steps, self._equal = state, steps, replica == _COMMON

        return finish, inner

    # --- uneven data: `torch.distributed.algorithms.Join` ---------------------------------------

    def join_hook(self, **kwargs: Any) -> OutOfData:
        """For `Join`: a replica that is out of data takes part with weight 0."""
        if not pick(self.averager.average, {"weight": 0.0}):
            raise TypeError(
                f"{self.averager!r} takes no weights: it cannot go on without a replica"
            )
        return OutOfData(self)

    @property
    def join_device(self) -> torch.device:
        return self._all[0].device

    @property
    def join_process_group(self) -> Any:
        return getattr(self._recorder.world, "group", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.averager!r})"


@torch.no_grad()
def _write(tensors: list[Any], values: list[Any]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)
