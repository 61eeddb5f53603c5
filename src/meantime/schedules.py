r"""Schedules: functions of the step, usable wherever a number is.

A schedule maps a step (a Python number or a 0-d array, counted from 0) to a value: a learning
rate counts the updates made so far, a period (`periodic(every=...)`) the local steps. Schedules
are pure arithmetic and run inside `torch.compile`, `torch.func.vmap` and `jax.jit`; of a Python
number they return a Python number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meantime import arrays
from meantime.arrays import Array
from meantime.made import made

Schedule = Callable[[Array], Array]
Hyperparameter = float | Array | Schedule
"""A number, a 0-d array or a schedule."""


def value_at(hyperparameter: Hyperparameter, step: Array) -> Array:
    """The value of a hyperparameter at a step."""
    return hyperparameter(arrays.precise(step)) if callable(hyperparameter) else hyperparameter


def is_zero(hyperparameter: Hyperparameter) -> bool:
    """Whether a hyperparameter is the number 0, so that what it scales can be left out."""
    return isinstance(hyperparameter, (int, float)) and hyperparameter == 0


def check(name: str, value: Hyperparameter, low: float, high: float = math.inf) -> None:
    """Refuse a number outside [low, high]; arrays and schedules are taken on trust.

    Raises:
        ValueError: with the name and the value.
        TypeError: neither a number, an array nor a schedule.
    """
    if callable(value) or arrays.is_array(value):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a 0-d array or a schedule, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        bound = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bound}, got {value!r}")


def check_integer(name: str, value: Any, low: int) -> int:
    """The value as an integer.

    Raises:
        ValueError: it is below `low`.
        TypeError: it is no integer.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    return number


def _progress(step: Array, steps: int) -> Array:
    return arrays.minimum(arrays.maximum(step / steps, 0.0), 1.0)


@made
def constant(value: float) -> Schedule:
    """The same value at every step.

    Example:
        >>> constant(0.1)(7)
        0.1
    """
    return lambda step: value


@made
def polynomial(start: float, end: float, steps: int, power: float = 1.0) -> Schedule:
    r"""From `start` to `end` over `steps`, then constant.

    .. math:: \mathrm{end} + (\mathrm{start} - \mathrm{end}) (1 - \min(t / T, 1))^p

    Raises:
        ValueError: `steps` is not positive.

    Example:
        >>> polynomial(1.0, 0.0, steps=4, power=2.0)(2)
        0.25
    """
    _check_steps(steps)
    return lambda step: end + (start - end) * (1.0 - _progress(step, steps)) ** power


@made
def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line from `start` to `end` over `steps`, then constant.

    Example:
        >>> linear(0.0, 1.0, steps=10)(3)
        0.3
    """
    _check_steps(steps)
    return lambda step: start + (end - start) * _progress(step, steps)


@made
def exponential(start: float, rate: float, steps: int, end: float | None = None) -> Schedule:
    r"""Decay by the factor `rate` every `steps` steps: :math:`\mathrm{start}\, r^{t/T}`.

    Args:
        end: a bound the value does not pass (from above for a decaying rate).

    Example:
        >>> exponential(1.0, 0.5, steps=10)(20)
        0.25
    """
    _check_steps(steps)
    if not rate > 0:
        raise ValueError(f"rate must be positive, got {rate!r}")
    logarithm = math.log(rate)

    def schedule(step: Array) -> Array:
        value = start * arrays.exp(step / steps * logarithm)
        if end is None:
            return value
        return arrays.maximum(value, end) if rate < 1 else arrays.minimum(value, end)

    return schedule


@made
def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    r"""Half a cosine from `start` to `end` over `steps`, then constant.

    .. math:: \mathrm{end} + \tfrac12 (\mathrm{start} - \mathrm{end})(1 + \cos(\pi \min(t/T, 1)))

    Loshchilov & Hutter 2017 (https://arxiv.org/abs/1608.03983), eq. 5, without restarts.

    Example:
        >>> cosine(1.0, steps=10)(5)
        0.5
    """
    _check_steps(steps)

    def schedule(step: Array) -> Array:
        return end + 0.5 * (start - end) * (1.0 + arrays.cos(math.pi * _progress(step, steps)))

    return schedule


@made
def warmup_cosine(
    peak: float, *, warmup: int, steps: int, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """A line from `start` to `peak` over `warmup` steps, then a cosine to `end` at `steps`.

    Args:
        steps: the length of the whole schedule, warm-up included.

    Raises:
        ValueError: the warm-up is negative or not shorter than the schedule.

    Example:
        >>> schedule = warmup_cosine(1.0, warmup=10, steps=110)
        >>> schedule(5), schedule(10), schedule(60)
        (0.5, 1.0, 0.5)
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"need 0 <= warmup < steps, got warmup={warmup!r}, steps={steps!r}")
    decay = cosine(peak, steps - warmup, end)
    return join([linear(start, peak, warmup), decay], [warmup]) if warmup else decay


@made
def piecewise(start: float, factors: Mapping[int, float]) -> Schedule:
    """Constant pieces: from each boundary step on, multiplied by the factor given for it.

    Example:
        >>> schedule = piecewise(1.0, {100: 0.1, 200: 0.1})
        >>> schedule(99), schedule(100)
        (1.0, 0.1)
    """

    def schedule(step: Array) -> Array:
        value: Array = start
        for boundary, factor in sorted(factors.items()):
            value = value * arrays.where(step >= boundary, factor, 1.0)
        return value

    return schedule


@made
def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each starts from step 0 at its boundary.

    Raises:
        ValueError: there is not one boundary less than schedules, or they do not increase.

    Example:
        >>> schedule = join([linear(0.0, 1.0, 10), constant(1.0)], [10])
        >>> schedule(5), schedule(50)
        (0.5, 1.0)
    """
    if len(boundaries) != len(schedules) - 1 or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"{len(schedules)} schedules need {len(schedules) - 1} increasing boundaries, "
            f"got {list(boundaries)}"
        )

    def schedule(step: Array) -> Array:
        value = schedules[0](step)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = arrays.where(step >= boundary, following(step - boundary), value)
        return value

    return schedule


@made
def qsr(
    learning_rate: Hyperparameter,
    alpha: float,
    base: int,
    power: float = 2.0,
    warmup: int = 0,
) -> Schedule:
    r"""The quadratic synchronisation rule: a longer period for a smaller learning rate.

    .. math:: H_t = \max\big(H_{\mathrm{base}},\ \lfloor (\alpha / \eta_t)^p \rfloor\big)

    For `periodic(every=...)`, which reads it at the start of a round; let the last round end on
    the last step with `last`.

    Args:
        learning_rate: :math:`\eta`, that of the local steps. At 0 the period has no end.
        alpha: :math:`\alpha`; 0.0175 for a ViT-B with AdamW in the paper.
        base: the shortest period :math:`H_{\mathrm{base}}`, in local steps.
        power: :math:`p`; the paper compares 2 with 1 and 3.
        warmup: the steps of the learning rate's warm-up, during which the period is what it is
            right after it: the small rates there ask for no long periods.

    Raises:
        ValueError: `alpha` or `power` is not positive, `base` is below 1, `warmup` negative.
        TypeError: `base` or `warmup` is not an integer.

    Gu et al. 2024 (https://arxiv.org/abs/2310.14423), section 2.

    Example:
        >>> period = qsr(linear(0.1, 0.0, steps=100), alpha=0.25, base=8)
        >>> period(0), period(50), period(80), period(100)
        (8, 25, 156, inf)
    """
    for name, value in (("alpha", alpha), ("power", power)):
        check(name, value, 0)
        if is_zero(value):
            raise ValueError(f"{name} must be positive, got {value!r}")
    base, warmup = check_integer("base", base, 1), check_integer("warmup", warmup, 0)

    def schedule(step: Array) -> Array:
        rate = value_at(learning_rate, arrays.maximum(step, warmup))
        positive = arrays.where(rate > 0, rate, 1.0)
        period = arrays.where(rate > 0, arrays.floor((alpha / positive) ** power), math.inf)
        return arrays.maximum(period, base)

    return schedule


def _check_steps(steps: int) -> None:
    if not steps > 0:
        raise ValueError(f"steps must be positive, got {steps!r}")
