"""Communication happens at exactly the steps that the rule names.

The rule, in plain Python and on numbers, is `synchronisations`; what happens is counted with
`Recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import meantime as mt
from meantime.testing.strategies import Timetable, timetables

Period = Callable[[int], int]


def synchronisations(
    period: Period,
    steps: int,
    after: int = 0,
    first: int | None = None,
    last: int | None = None,
    forced: Collection[int] = (),
) -> list[int]:
    """The steps, counted from 1, after which replicas communicate.

    Rounds follow each other. The first begins after the warm-up and lasts a period, or ends at
    `first`. None begins at `last` or later, and none goes on after it.
    """
    begin = after
    end = after + period(after)
    if first is not None:
        begin, end = 0, first
    ends = set()
    while begin < steps and (last is None or begin < last):
        end = end if last is None else min(end, last)
        ends.add(end)
        begin, end = end, end + period(end)
    return [step for step in range(1, steps + 1) if step in ends or step in forced]


def observed(
    tx: mt.Transform, steps: int, levels: Collection[str] = (), forced: Collection[int] = ()
) -> list[tuple[int, str]]:
    """The steps after which there was communication, with the level (or "")."""
    params = torch.zeros(2)
    state = tx.init(params)
    found = []
    for step in range(1, steps + 1):
        worlds = {name: mt.Recorded(mt.Solo()) for name in levels or ("",)}
        replicas: Any = worlds if levels else worlds[""]
        params, state = tx.average(params, state, replicas=replicas, now=step in forced)
        for name, world in worlds.items():
            assert len(world.calls) <= 1
            found += [(step, name)] * len(world.calls)
    return found


def steps_of(found: list[tuple[int, str]]) -> list[int]:
    return [step for step, _ in found]


def constant(period: int) -> Period:
    return lambda step: period


some_steps = st.sets(st.integers(1, 16), max_size=3)


@given(timetables(), some_steps)
def test_periodic(table: Timetable, forced: set[int]) -> None:
    tx = mt.periodic(mt.average_params(), *table[:4])
    wanted = synchronisations(
        constant(table.every), table.steps, table.after, table.first, table.last, forced
    )
    assert steps_of(observed(tx, table.steps, forced=forced)) == wanted


@given(timetables(), some_steps, st.integers(0, 3), st.integers(0, 5), st.integers(1, 5))
def test_scheduled_period(
    table: Timetable, forced: set[int], slope: int, offset: int, modulus: int
) -> None:
    """A period that changes, read at the start of each round; fractions are cut, 0 counts as 1."""

    def every(step):
        return (slope * step + offset) % modulus + 0.75

    def period(step: int) -> int:
        return max(int(every(step)), 1)

    tx = mt.periodic(mt.average_params(), every, *table[1:4])
    wanted = synchronisations(period, table.steps, table.after, table.first, table.last, forced)
    assert steps_of(observed(tx, table.steps, forced=forced)) == wanted


@given(timetables(max_steps=24), st.integers(1, 4), st.integers(0, 3))
def test_nested(table: Timetable, every: int, after: int) -> None:
    """To the inner one, the rounds of the outer one are the steps."""
    inner = mt.periodic(mt.average_params(), every, after)
    tx = mt.periodic(inner, *table[:4])
    rounds = synchronisations(
        constant(table.every), table.steps, table.after, table.first, table.last
    )
    chosen = synchronisations(constant(every), len(rounds), after)
    assert steps_of(observed(tx, table.steps)) == [rounds[i - 1] for i in chosen]


@given(timetables(max_steps=24), st.integers(1, 4))
def test_alternate(table: Timetable, every: int) -> None:
    tx = mt.periodic(
        mt.alternate(mt.average_params("near"), mt.average_params("far"), every), *table[:4]
    )
    rounds = synchronisations(
        constant(table.every), table.steps, table.after, table.first, table.last
    )
    wanted = [(step, "far" if i % every == 0 else "near") for i, step in enumerate(rounds, start=1)]
    assert observed(tx, table.steps, ["near", "far"]) == wanted


@given(
    st.integers(1, 3),
    st.lists(st.integers(2, 3), max_size=2),
    st.integers(0, 5),
    st.integers(1, 24),
)
def test_hierarchical(low: int, factors: list[int], after: int, steps: int) -> None:
    """After every step only the highest level that is due is averaged over."""
    periods = {"a": low}
    for name, factor in zip("bc", factors, strict=False):
        periods[name] = factor * max(periods.values())
    tx = mt.hierarchical_sgd(mt.identity(), periods, after=after)
    wanted = []
    for step in range(after + 1, steps + 1):
        due = [name for name, period in periods.items() if (step - after) % period == 0]
        wanted += [(step, due[-1])] if due else []
    assert observed(tx, steps, list(periods)) == wanted


@given(st.integers(1, 5), st.integers(1, 16), st.integers(1, 16))
def test_a_forced_step_averages_over_the_highest_level(low: int, steps: int, now: int) -> None:
    assume(now <= steps)
    tx = mt.hierarchical_sgd(mt.identity(), {"node": low, "world": 2 * low})
    found = observed(tx, now, ["node", "world"], forced={now})
    assert found[-1] == (now, "world")


@given(st.integers(0, 8), st.integers(1, 5), st.integers(1, 16))
def test_post_local_sgd(warmup: int, every: int, steps: int) -> None:
    """Gradients are averaged in every step of the warm-up, parameters at the period after it."""
    tx = mt.post_local_sgd(mt.sgd(0.1), every, warmup)
    params, grads = torch.zeros(1), torch.ones(1)
    state = tx.init(params)
    for step in range(1, steps + 1):
        in_update, in_average = mt.Recorded(mt.Solo()), mt.Recorded(mt.Solo())
        _, state = tx.update(grads, state, params, replicas=in_update)
        params, state = tx.average(params, state, replicas=in_average)
        assert len(in_update.calls) == (step <= warmup)
        assert len(in_average.calls) == (step > warmup and (step - warmup) % every == 0)
