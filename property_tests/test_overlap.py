"""Laws of synchronisations that are under way during the next local steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing.cases import vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, trees

STEPS = 11


def train(tx: mt.Transform, size: int, params: Any, seed: int, forced: int = 0) -> list[Any]:
    """All replicas' parameters after every step, and the state; they move at random."""
    generator = torch.Generator().manual_seed(seed)
    params = tree.map(lambda x: x.expand(size, *x.shape).clone(), params)
    state = vmapped(tx.init, params)
    found = []
    for step in range(1, STEPS + 1):
        moves = tree.map(lambda x: torch.randn(x.shape, generator=generator).to(x.dtype), params)
        params = tree.map(torch.add, params, moves)

        def average(params: Any, state: Any, now: bool = step == forced) -> Any:
            return tx.average(params, state, replicas=mt.Vmapped(size), now=now)

        params, state = vmapped(average, params, state)
        found.append((params, state))
    return found


numbers = st.integers(0, 2**31)
doubles = trees(dtypes=[torch.float64])


@given(replica_counts(4), doubles, st.integers(1, 5), st.integers(1, 7), numbers)
def test_what_never_arrives_leaves_replicas_alone(
    size: int, params: Any, every: int, steps: int, seed: int
) -> None:
    """With all weight on the local parameters."""
    tx = mt.delayed(mt.periodic(mt.average_params(), every), steps, merge=1.0)
    alone = train(mt.identity(), size, params, seed)
    same_bits("params", train(tx, size, params, seed)[-1][0], alone[-1][0], "replicas were moved")


@given(replica_counts(4), doubles, st.integers(2, 5), st.data())
def test_the_delta_keeps_the_steps_made_meanwhile(
    size: int, params: Any, every: int, data: st.DataObject
) -> None:
    """Differences between replicas are then those made since the message was sent."""
    steps = data.draw(st.integers(1, every - 1))
    tx = mt.delayed(mt.periodic(mt.average_params(), every), steps, merge="delta")
    seed = data.draw(numbers)
    alone = [params for params, _ in train(mt.identity(), size, params, seed)]
    found = [params for params, _ in train(tx, size, params, seed)]
    sent, arrived = every - 1, every + steps - 1

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x - x[:1]

    since = tree.map(lambda a, b: apart(a - b), alone[arrived], alone[sent])
    close("params", tree.map(apart, found[arrived]), since, "steps were lost", scale=alone[arrived])


@given(replica_counts(4), doubles, st.integers(1, 6), st.integers(1, STEPS), numbers)
def test_a_forced_synchronisation_waits_for_nothing(
    size: int, params: Any, steps: int, forced: int, seed: int
) -> None:
    """All replicas are equal then, and nothing is under way any more."""
    tx = mt.delayed(mt.periodic(mt.average_params(), every=3), steps, merge=0.5)
    found, state = train(tx, size, params, seed, forced)[forced - 1]
    for leaf in tree.leaves(found):
        for replica in leaf[1:]:
            same_bits("params", replica, leaf[0], "replicas differ")
    assert not state.left.any()


@given(doubles, st.integers(1, 4), numbers)
def test_alone_there_are_no_others_to_wait_for(params: Any, every: int, seed: int) -> None:
    def outer(mean: Any) -> mt.Transform:
        rule = mt.sgd(0.7, momentum=0.9, nesterov=True)
        return mt.periodic(mt.outer(mt.chain(mean, rule)), every)

    wanted = train(outer(mt.mean()), 1, params, seed)[-1][0]
    found = train(outer(mt.eager_mean()), 1, params, seed)[-1][0]
    close("params", found, wanted, "an eager mean of one replica is not its own", scale=wanted)


@given(replica_counts(4), doubles, st.integers(1, 4), numbers)
def test_a_full_pull_makes_all_equal_to_the_last_anchor(
    size: int, params: Any, every: int, seed: int
) -> None:
    tx = mt.periodic(mt.overlapped(pull=1.0, momentum=0.0), every)
    found = train(tx, size, params, seed)
    last = STEPS // every * every - 1
    start = tree.map(lambda x: x.expand(size, *x.shape), params)
    close("params", found[last][0], start, "not the anchor", scale=found[last - 1][0])


@given(replica_counts(4), doubles, st.integers(1, STEPS), numbers)
def test_overlapped_replicas_meet_when_they_have_to(
    size: int, params: Any, forced: int, seed: int
) -> None:
    found = train(mt.periodic(mt.overlapped(), every=3), size, params, seed, forced)
    alone = train(mt.periodic(mt.overlapped(), every=3), size, params, seed)
    after = found[forced - 1][0]
    for leaf in tree.leaves(after):
        for replica in leaf[1:]:
            same_bits("params", replica, leaf[0], "replicas differ")
    if forced % 3:  # what they held
        held = tree.map(lambda x: x.mean(0, keepdim=True).expand(x.shape), alone[forced - 1][0])
        close("params", after, held, "not the mean", scale=alone[forced - 1][0])


@given(st.integers(1, 6), doubles, st.floats(0.0, 0.95), st.floats(0.1, 1.0), numbers)
def test_delayed_nesterov_of_one_anchor_is_nesterov_of_the_mean(
    n: int, params: Any, momentum: float, rate: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    delayed = mt.delayed_nesterov(rate, every=n, momentum=momentum)
    whole = mt.sgd(rate, momentum=momentum, nesterov=momentum > 0)
    slow, fast = delayed.init(params), whole.init(params)
    for _ in range(3):
        grads = [
            tree.map(lambda x: torch.randn(x.shape, generator=generator).double(), params)
            for _ in range(n)
        ]
        moved = tree.map(torch.zeros_like, params)
        for grad in grads:
            updates, slow = delayed.update(grad, slow, params)
            moved = tree.map(torch.add, moved, updates)
        average = tree.map(lambda *each: sum(each) / n, *grads)
        wanted, fast = whole.update(average, fast, params)
        ones = tree.map(lambda x: 10 * torch.ones_like(x), params)
        close("updates", moved, wanted, "not the step of the mean", scale=ones)


@pytest.mark.parametrize("initial", [1, 7, 40])
@given(replica_counts(4), st.lists(st.floats(0.01, 100.0), min_size=40, max_size=40))
def test_adacomm_is_the_same_everywhere_and_never_rises(
    initial: int, size: int, losses: list[float]
) -> None:
    tx = mt.periodic(mt.average_params(), every=mt.adacomm(initial, block=4))
    spread = torch.linspace(0.5, 1.5, size)
    params = torch.zeros(size)
    state = vmapped(tx.init, params)
    periods = []
    for loss in losses:

        def average(params: Any, state: Any, scale: Any, loss: float = loss) -> Any:
            return tx.average(params, state, replicas=mt.Vmapped(size), value=loss * scale)

        params, state = vmapped(average, params, state, spread)
        every = state.policy.period
        assert (every == every[0]).all()
        assert (state.due == state.due[0]).all()
        periods.append(int(every[0]))
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] >= 1
