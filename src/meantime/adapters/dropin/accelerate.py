"""Local SGD in a loop of Hugging Face's accelerate: `accelerate.local_sgd.LocalSGD`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from meantime.adapters.dropin.parameters import averaged, trained
from meantime.averaging import average_params, periodic
from meantime.replicas import Distributed
from meantime.schedules import check_integer


class LocalSGD:
    r"""Train on this process alone, and average the parameters every few steps.

    Inside of the context gradients are not exchanged, and the parameters are averaged over all
    processes after steps :math:`K, 2K, \dots` and at the end, unless the last step did so. A step
    is an update: under `accelerator.accumulate` micro-batches do not count. All parameters that
    require gradients take part.

    Leaving the context by an exception communicates nothing.

    Args:
        accelerator: the `Accelerator`.
        model: the model that `accelerator.prepare` returned.
        local_sgd_steps: the period :math:`K`.
        enabled: whether to do anything at all; with one process nothing is done either.

    Attributes:
        num_steps: the steps made.

    Raises:
        NotImplementedError: sharded training, with FSDP or DeepSpeed for example.
        TypeError: the model does not come from `accelerator.prepare`, or `local_sgd_steps` is not
            an integer.
        ValueError: `local_sgd_steps` is below 1.

    Example:
        >>> from meantime.adapters.dropin import LocalSGD
        >>> def train(accelerator, model, optimizer, loader, loss_of):
        ...     with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...         for batch in loader:
        ...             with accelerator.accumulate(model):
        ...                 accelerator.backward(loss_of(model, batch))
        ...                 optimizer.step()
        ...                 optimizer.zero_grad()
        ...                 local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        local_sgd_steps: int,
        enabled: bool = True,
    ):
        kind = accelerator.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise NotImplementedError(
                f"LocalSGD needs one whole model on every process, which {kind} has not"
            )
        self.enabled = enabled and kind != "NO"
        self.num_steps = 0
        self._accelerator = accelerator
        if enabled:
            every = check_integer("local_sgd_steps", local_sgd_steps, 1)
        if self.enabled:
            if not hasattr(model, "no_sync"):
                raise TypeError(
                    "LocalSGD needs the model that accelerator.prepare() returned, got "
                    f"{type(model).__name__}"
                )
            self._model = model
            self._averager = periodic(average_params(), every)
            self._state = self._averager.init(trained(model.parameters()))
            self._replicas = Distributed()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self._model.no_sync()
            self._no_sync.__enter__()
        return self

    def step(self) -> None:
        """Count a step, and average if it is time to. Call it after the step of the optimizer."""
        if not self._accelerator.sync_gradients:  # a micro-batch
            return
        self.num_steps += 1
        if self.enabled:
            self._average()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        try:
            # After an exception the other processes may be anywhere.
            if error is None and self._state.count > self._state.start:
                self._average(now=True, counts=False)
        finally:
            self._no_sync.__exit__(None, None, None)

    def _average(self, **extra: Any) -> None:
        parameters = trained(self._model.parameters())
        self._state = averaged(self._averager, parameters, self._state, self._replicas, **extra)
