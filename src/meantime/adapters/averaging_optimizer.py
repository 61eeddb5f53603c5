"""Periodic averaging for a script that has a `torch.optim` optimizer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from meantime.adapters.arena import arena as move_to_arena
from meantime.adapters.averaging import COMMON, Averaging
from meantime.adapters.companions import Companions
from meantime.adapters.in_place import write
from meantime.adapters.joining import Joining
from meantime.adapters.packing import share
from meantime.adapters.start import check_choice, equal_start
from meantime.adapters.synchronisation import Synchronisation
from meantime.adapters.wrapper import OptimizerWrapper, eagerly
from meantime.averaging import OuterState
from meantime.replicas.base import Levels
from meantime.state import find_all
from meantime.transform import Transform

_LOGGER = logging.getLogger("meantime")


class AveragingOptimizer(OptimizerWrapper, Joining):
    """Any `torch.optim` optimizer, with an averager run once after every step.

    To the rest of the script it is the optimizer inside: `param_groups`, `state` and `defaults`
    are that one's at all times, so learning rate schedulers, gradient scalers, closures, hooks
    and checkpoints work as before. Parameters are written in place: their storage, strides, ties
    and views survive.

    All parameters that require gradients take part in the averaging, whether this replica has a
    gradient for them or not. Under a `torch.amp.GradScaler` a step whose gradients overflowed
    skips the optimizer inside but not the averager: the schedule stays the same on all replicas.

    An averager may act on gradients too: that of `post_local_sgd(identity(), every=8,
    warmup=100)` averages them during the warm-up, so that a plain module trains there as one in
    `DistributedDataParallel`. (For a model in that, there is `post_local_hook`.)

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
            counters; all replicas must have them), or `"reset"` it.
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
        check_choice("start", start, ("broadcast", "check"))
        OptimizerWrapper.__init__(self, optimizer)
        Joining.__init__(self)
        self.replicas = replicas
        self.on_synchronisation = on_synchronisation
        self.last_synchronisation: Synchronisation | None = None
        self._averaging = Averaging(optimizer, averager, replicas)
        self._world = self._averaging.recorder.world
        self._companions = Companions(optimizer, model, buffers, optimizer_state)
        self._extra: dict[str, Any] = {}  # arguments of the present step
        self._shown = False  # whether averaged parameters are shown
        if arena:
            move_to_arena(self._averaging.parameters)
        parameters = self._averaging.everyone  # frozen ones too
        equal_start(self.averager, parameters, self._companions.buffers, self._world, start)
        self._averaging.admit()  # what the state holds of the parameters is that of replica 0

    @property
    def averager(self) -> Transform:
        """The transform that acts after every step."""
        return self._averaging.averager

    @property
    def averager_state(self) -> Any:
        """Its state, in which the parameters are a list, with `None` for frozen ones."""
        return self._averaging.state

    @property
    def warming_up(self) -> bool:
        """Whether the next step belongs to the warm-up (`after`) of a `periodic` averager."""
        return self._averaging.warming_up

    # --- steps ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **extra: Any) -> Any:
        """Step the optimizer inside, then average if that is due.

        Args:
            closure: handed to the optimizer inside.
            extra: what the averager names, such as `weight=tokens` or `value=loss`.

        Returns:
            What the `step` of the optimizer inside returns; None if it was skipped.

        Raises:
            TypeError: the averager does not name an extra argument; nothing is stepped then.
        """
        self._averaging.check(extra)
        self._extra = extra
        try:
            return super().step(closure)
        finally:
            self._extra = {}

    step.hooked = True  # type: ignore[attr-defined]

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
            gradients = [p.grad for p in self._averaging.parameters]
            return any(g is not None and bool(g.any()) for g in gradients)
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
        self._average(now=True, counts=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside and to the averaging. Collective: their values
        become those of replica 0."""
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        write(new, self._world.broadcast(new))
        self._averaging.readmit()

    @eagerly
    @torch.no_grad()
    def _average_gradients(self, **extra: Any) -> bool:
        return self._averaging.update_gradients(**self._extra, **extra)

    @eagerly
    @torch.no_grad()
    def _average(self, **extra: Any) -> None:
        began = time.perf_counter()
        extra = {**self._extra, **extra}
        averaging, recorder = self._averaging, self._averaging.recorder
        recorder.measure(self.on_synchronisation is not None)
        communicated = averaging.average(**extra)
        recorder.measure(False)
        if not communicated:
            return
        self._companions.synchronise(averaging.parameters, recorder.reached, extra.get("weight"))
        outer = bool(find_all(averaging.state, OuterState))
        done = recorder.summary(averaging.steps, time.perf_counter() - began, outer)
        recorder.clear()
        self.last_synchronisation = done
        _LOGGER.info("%s", done)
        if self.on_synchronisation is not None:
            self.on_synchronisation(done)

    # --- evaluation ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Show the mean over the replicas, and put this replica's own values back afterwards.

        Inside the context the parameters and the buffers hold their means over all replicas, for
        an evaluation or a checkpoint of the averaged model. Where the averager keeps an average
        along the trajectory (`ema`, `swa`, `lawa`) the parameters hold the mean of that one.
        Afterwards everything is what it was, bit for bit. Collective.
        """
        own = [*self._averaging.parameters, *self._companions.buffers]
        saved = [x.detach().clone() for x in own]
        self._shown = True
        try:
            self._averaging.show_means()
            self._companions.synchronise_buffers(self._world)
            yield
        finally:
            self._shown = False
            write(own, saved)

    # --- checkpoints ---------------------------------------------------------------------------

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
        if of_any_replica:
            state_dict = share(state_dict, {"replica": torch.tensor(COMMON)})
        super().load_state_dict(state_dict)

    def _saved(self, inner: dict[str, Any]) -> dict[str, Any]:
        return self._averaging.saved(inner)

    def _restored(self, saved: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Any]]:
        return self._averaging.restored(saved)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.averager!r})"
