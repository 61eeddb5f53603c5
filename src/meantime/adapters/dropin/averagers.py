"""Periodic averaging of parameters: `torch.distributed.algorithms.model_averaging`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meantime.adapters.dropin.parameters import Parameters, averaged, flat, trained
from meantime.adapters.dropin.processes import members
from meantime.averaging import PeriodicState, average_params, periodic
from meantime.replicas import Solo
from meantime.replicas.base import Levels
from meantime.schedules import check_integer
from meantime.transform import Transform


class ModelAverager:
    """Counts the calls of `average_parameters`, and has a transform average after some of them.

    The first average comes after call `warmup_steps + 1`, others may follow at the period.
    """

    def __init__(self, averager: Transform, period: int, warmup_steps: int, replicas: Levels):
        self._period, self._warmup = period, warmup_steps
        self._transform = periodic(averager, period, after=warmup_steps, first=warmup_steps + 1)
        self._replicas = replicas
        # For each set of parameters, known by its first: the state of the transform.
        self._states: dict[Tensor, PeriodicState] = {}
        self._start = 0  # with how many calls other sets begin

    def average_parameters(self, params: Parameters) -> None:
        """Count a call, and average the parameters if it is time to.

        Call it after every step, on every process, also where the step was skipped.

        Args:
            params: the parameters of a module, or the parameter groups of an optimizer. Those
                that require gradients are averaged, whether this process has some or not.

        Raises:
            NotImplementedError: something else than parameters and parameter groups.
            ValueError: there are none, or the processes hand over different ones at the first
                average.
        """
        parameters = flat(params)
        key, parameters = _first(parameters), trained(parameters)
        state = self._states.get(key) or self._state(self._start)
        self._states[key] = averaged(self._transform, parameters, state, self._replicas)

    @property
    def warmup_steps(self) -> int:
        return self._warmup

    @property
    def step(self) -> int:
        """How many calls were made; the most, if they were made for several sets of parameters.

        Set it to continue from a call.
        """
        return max((int(state.count) for state in self._states.values()), default=self._start)

    @step.setter
    def step(self, value: int) -> None:
        self._start = check_integer("step", value, 0)
        self._states.clear()

    def step_of(self, params: Parameters) -> int:
        """How many calls were made for these parameters."""
        state = self._states.get(_first(flat(params)))
        return self._start if state is None else int(state.count)

    def set_step_of(self, params: Parameters, value: int) -> None:
        """Continue from a call for these parameters."""
        self._states[_first(flat(params))] = self._state(check_integer("step", value, 0))

    def _state(self, calls: int) -> PeriodicState:
        """The state of the transform after so many calls."""
        begun = max(calls, self._warmup)
        due = begun + 1 + (self._warmup - begun) % self._period
        start = max(due - self._period, self._warmup)
        state: PeriodicState = self._transform.init([])
        zero = state.count
        return state._replace(count=zero + calls, start=zero + start, due=zero + due)


class PeriodicModelAverager(ModelAverager):
    r"""Average parameters every few calls, after a warm-up.

    With calls counted from 1, a period :math:`P` and a warm-up :math:`W`, it averages after the
    calls :math:`W + 1, W + 1 + P, W + 1 + 2P, \dots`: it is
    `periodic(average_params(), every=P, after=W, first=W + 1)`.

    Calls are counted apart for sets of parameters that differ in their first one, so that several
    optimizers may share an averager.

    Args:
        period: the period :math:`P`.
        warmup_steps: the warm-up :math:`W`.
        process_group: the processes; the default group if None, which is looked up at the first
            average. A process outside of the group only counts.

    Raises:
        ValueError: a period below 1 or a negative warm-up.
        TypeError: one of them is not an integer.

    Example:
        >>> from meantime.adapters.dropin import PeriodicModelAverager
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> def after_every_step(model):
        ...     averager.average_parameters(model.parameters())
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None):
        period = check_integer("period", period, 1)
        warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        super().__init__(average_params(), period, warmup_steps, members(process_group))

    @property
    def period(self) -> int:
        return self._period


class HierarchicalModelAverager(ModelAverager):
    r"""Average parameters over small groups of processes often, over large ones seldom.

    After call :math:`t > W` it averages over the groups with the largest period that divides
    :math:`t - 1`. The periods are not counted from the end of the warm-up :math:`W`.

    Calls are counted apart for sets of parameters that differ in their first one.

    Args:
        period_group_size_dict: the size of the groups for each period, both increasing. Groups
            are consecutive processes; the last one is all of them.
        warmup_steps: the warm-up :math:`W`.
        process_group: all processes; the default group if None. Construction is collective over
            it. A process outside of it only counts.

    Attributes:
        period_process_group_dict: this process's group for each period.

    Raises:
        ValueError: no period, numbers that are not increasing or out of range, sizes that do
            not divide the number of processes or do not end with it.
        TypeError: one of the numbers is not an integer.

    Example:
        >>> from meantime.adapters.dropin import HierarchicalModelAverager
        >>> def averager_for_two_nodes_of_eight():
        ...     return HierarchicalModelAverager({4: 8, 16: 16}, warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
    ):
        sizes = _levels(period_group_size_dict or {})
        warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        world = members(process_group)
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        if isinstance(world, Solo):
            levels: dict[str, Any] = {str(period): world for period in sizes}
        else:
            largest = list(sizes.values())[-1]
            if largest != world.size:
                raise ValueError(
                    "the last group is that of all processes: its size must be "
                    f"{world.size}, got {largest}"
                )
            levels = {str(period): world.groups(size) for period, size in sizes.items()}
            for period in sizes:
                self.period_process_group_dict[period] = levels[str(period)].group
        super().__init__(_over_largest(list(sizes)), 1, warmup_steps, levels)


def _levels(sizes: Mapping[int, int]) -> dict[int, int]:
    if not sizes:
        raise ValueError("period_group_size_dict needs at least one period, such as {4: 8}")
    checked = {
        check_integer("a period", p, 1): check_integer("a group size", n, 1)
        for p, n in sizes.items()
    }
    for (period, size), (next_period, next_size) in pairwise(checked.items()):
        if next_period <= period or next_size < size:
            raise ValueError(
                f"a longer period is for a larger group: {{{next_period}: {next_size}}} cannot "
                f"follow {{{period}: {size}}} in period_group_size_dict"
            )
    return checked


def _over_largest(periods: list[int]) -> Transform:
    """Average over the level of the largest period that divides the number of earlier steps."""
    averagers = {period: average_params(str(period)) for period in reversed(periods)}

    def average(
        params: Any, state: Any, *, step: Any, replicas: Levels, donate: bool = False
    ) -> tuple[Any, Any]:
        for period, averager in averagers.items():
            if (int(step) - 1) % period == 0:
                return averager.average(params, state, replicas=replicas, donate=donate)
        return params, state

    return Transform(averagers[periods[0]].init, average=average)


def _first(parameters: list[Tensor]) -> Tensor:
    if not parameters:
        raise ValueError("there are no parameters to average: was an iterator used up before?")
    return parameters[0]
