"""Averagers: when they act, what they keep, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import vmap

import meantime as mt

LAST = 2**31 - 1
ONE = torch.zeros(1)


def due_steps(tx, steps: int, *, now=(), form=bool, replicas=mt.Solo):
    """The local steps (from 1) after which `tx` communicated."""
    params, state, found = ONE, tx.init(ONE), []
    for t in range(1, steps + 1):
        world = mt.Recorded(replicas())
        params, state = tx.average(params, state, replicas=world, now=form(t in now))
        if world.calls:
            found.append(t)
    return found


def periodic(*arguments, **options):
    return mt.periodic(mt.average_params(), *arguments, **options)


# --- when: periodic --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (periodic(1), range(1, 21)),
        (periodic(3), [3, 6, 9, 12, 15, 18]),
        (periodic(4, after=2), [6, 10, 14, 18]),
        (periodic(100), []),
        (periodic(4, first=1), [1, 5, 9, 13, 17]),
        (periodic(4, after=2, first=3), [3, 7, 11, 15, 19]),
        (periodic(4, last=10), [4, 8, 10]),
        (periodic(4, last=8), [4, 8]),
        (periodic(4, last=3), [3]),
        (periodic(4, after=6, last=9), [9]),
        (periodic(4, first=2, last=7), [2, 6, 7]),
        (periodic(4, first=9, last=7), [7]),
        (periodic(1, last=3), [1, 2, 3]),
        (periodic(LAST, after=LAST), []),
    ],
)
def test_when(tx, expected):
    assert due_steps(tx, 20) == list(expected)


@pytest.mark.parametrize("last", range(3, 8))
def test_last_within_the_warmup(last):
    """`last` shortens the first round, which begins after the warm-up or not at all."""
    assert due_steps(periodic(3, after=4, last=last), 20) == ([last] if last > 4 else [])


numpy_now = pytest.param(
    np.bool_,
)


@pytest.mark.parametrize("form", [bool, torch.tensor, numpy_now])
def test_now(form):
    """A forced synchronisation moves no other one, and one that is due as well happens once."""
    assert due_steps(periodic(4), 12, now=(1, 3, 4, 5, 11), form=form) == [1, 3, 4, 5, 8, 11, 12]
    assert due_steps(periodic(4, last=6), 12, now=(9,), form=form) == [4, 6, 9]


def test_now_at_the_end_averages():
    tx = periodic(10)
    params = torch.tensor([[0.0], [4.0]])

    def run(params, now):
        return tx.average(params, tx.init(params), replicas=mt.Vmapped(2), now=now)[0]

    assert vmap(lambda p: run(p, False))(params).flatten().tolist() == [0.0, 4.0]
    assert vmap(lambda p: run(p, True))(params).flatten().tolist() == [2.0, 2.0]
    now = torch.tensor(True)
    assert vmap(lambda p: run(p, now))(params).flatten().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("change", range(1, 12))
def test_the_period_of_a_round_is_the_one_at_its_start(change):
    """A period that changes within a round lengthens or shortens the next one."""
    for before, after in ((4, 2), (2, 5)):
        schedule = mt.schedules.piecewise(before, {change: after / before})
        expected, end = [], 0
        while end <= 20:
            end += before if end < change else after
            expected.append(end)
        assert due_steps(periodic(schedule), 20) == [t for t in expected if t <= 20]


@pytest.mark.parametrize("after", [0, 3])
def test_schedule_of_the_period(after):
    """Rounded down and at least 1."""

    def every(step):
        return 0.4 + 0.5 * step  # 0 -> 0.4, 1 -> 0.9, 2 -> 1.4, 3 -> 1.9, 4 -> 2.4, ...

    expected, end = [], after
    while end <= 30:
        end += max(1, math.floor(0.4 + 0.5 * end))
        expected.append(end)
    assert due_steps(periodic(every, after=after), 30) == [t for t in expected if t <= 30]
    assert due_steps(periodic(lambda step: -5, after=after), 6) == list(range(after + 1, 7))


def test_a_schedule_is_read_once_a_round():
    read = []

    def every(step):
        read.append(int(step))
        return 5

    due_steps(periodic(every), 14)
    assert read == [0, 5, 10]


def test_schedule_with_last():
    assert due_steps(periodic(lambda step: step + 2, last=9), 30) == [2, 6, 9]


def test_schedule_and_now():
    """A forced synchronisation does not start a round."""
    assert due_steps(periodic(mt.schedules.piecewise(4.0, {8: 0.5})), 12, now=(5,)) == [
        4,
        5,
        8,
        10,
        12,
    ]


def test_counters_saturate():
    tx = periodic(2)
    state = tx.init(ONE)
    near = torch.tensor(LAST - 2, dtype=torch.int32)
    state = state._replace(count=near, due=near + 1)
    seen = []
    for _ in range(5):
        world = mt.Recorded(mt.Solo())
        _, state = tx.average(ONE, state, replicas=world)
        assert 0 < int(state.count) <= LAST
        assert 0 < int(state.due) <= LAST
        assert state.count.dtype == state.due.dtype == torch.int32
        seen.append(bool(world.calls))
    assert int(state.count) == LAST
    assert seen[0]


def test_long_periods_do_not_overflow():
    for tx in (periodic(LAST), periodic(LAST, after=LAST)):
        assert int(tx.init(ONE).due) == LAST
    # of a schedule: at least a billion
    assert int(periodic(lambda step: LAST, after=5).init(ONE).due) > 10**9
    assert int(periodic(lambda step: LAST, after=LAST).init(ONE).due) == LAST


@pytest.mark.parametrize(
    "every", [1e12, math.inf, torch.tensor(1e12)], ids=["number", "inf", "array"]
)
def test_a_schedule_of_enormous_periods(every):
    """ "Never again", as a schedule may put it."""
    assert due_steps(periodic(lambda step: every), 5) == []


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: periodic(0), ValueError, "every must be at least 1, got 0"),
        (lambda: periodic(-3), ValueError, "every.*-3"),
        (lambda: periodic(2.0), TypeError, "every must be an integer.*2.0"),
        (lambda: periodic(True), TypeError, "every.*True"),
        (lambda: periodic("8"), TypeError, "every.*'8'"),
        (lambda: periodic(None), TypeError, "every.*None"),
        (lambda: periodic(2, after=-1), ValueError, "after must be at least 0, got -1"),
        (lambda: periodic(2, after=1.5), TypeError, "after.*1.5"),
        (lambda: periodic(2, first=0), ValueError, "first.*0"),
        (lambda: periodic(2, first=2.5), TypeError, "first.*2.5"),
        (lambda: periodic(2, last=0), ValueError, "last.*0"),
        (lambda: periodic(2, last="9"), TypeError, "last.*'9'"),
        (lambda: mt.local_sgd(mt.sgd(0.1), every=0), ValueError, "every"),
        (lambda: mt.local_sgd(mt.sgd(0.1), every=4, last=0), ValueError, "last"),
        (lambda: mt.post_local_sgd(mt.sgd(0.1), 4, warmup=-1), ValueError, "-1"),
        (lambda: mt.post_local_sgd(mt.sgd(0.1), 4, warmup=1.0), TypeError, "1.0"),
        (lambda: mt.diloco(mt.sgd(0.1), every=0), ValueError, "every"),
        (lambda: mt.diloco(mt.sgd(0.1), momentum=1.5), ValueError, "1.5"),
        (lambda: mt.diloco(mt.sgd(0.1), learning_rate=-1.0), ValueError, "learning_rate.*-1"),
        (lambda: mt.slowmo(mt.sgd(0.1), -0.1), ValueError, "fast_learning_rate.*-0.1"),
        (lambda: mt.slowmo(mt.sgd(0.1), 0.1, momentum=2), ValueError, "momentum.*2"),
        (lambda: mt.slowmo(mt.sgd(0.1), 0.1, slow_learning_rate=-1), ValueError, "slow_learning"),
        (lambda: mt.slowmo(mt.sgd(0.1), None), TypeError, "fast_learning_rate.*None"),
        (lambda: mt.hierarchical_sgd(mt.sgd(0.1), {}), ValueError, "at least one level"),
        (lambda: mt.hierarchical_sgd(mt.sgd(0.1), {"a": 2, "b": 5}), ValueError, "multiple"),
        (lambda: mt.hierarchical_sgd(mt.sgd(0.1), {"a": 0, "b": 5}), ValueError, "multiple|least"),
        (lambda: mt.alternate(mt.average_params(), mt.average_params(), 0), ValueError, "every"),
        (lambda: mt.warmup_mean(-1), ValueError, "steps.*-1"),
        (lambda: mt.warmup_mean(2.5), TypeError, "steps.*2.5"),
    ],
)
def test_errors(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("every", [{"world": 0}, {"world": 2.5}, {"node": 2, "world": 4.0}])
def test_periods_of_levels(every):
    with pytest.raises((ValueError, TypeError), match=r"every|period|integer"):
        mt.hierarchical_sgd(mt.sgd(0.1), every)


def test_alternate():
    levels = {"node": mt.Recorded(mt.Solo()), "world": mt.Recorded(mt.Solo())}
    tx = mt.alternate(mt.average_params("node"), mt.average_params("world"), every=3)
    state, seen = tx.init(ONE), []
    for t in range(1, 8):
        before = len(levels["world"].calls)
        _, state = tx.average(ONE, state, replicas=levels, now=t == 5)
        seen.append(len(levels["world"].calls) > before)
    assert seen == [False, False, True, False, True, True, False]
    assert len(levels["node"].calls) == 4


def test_three_levels():
    levels = {name: mt.Recorded(mt.Solo()) for name in ("chip", "node", "world")}
    tx = mt.hierarchical_sgd(mt.identity(), {"world": 12, "chip": 2, "node": 4})
    params, state, seen = ONE, tx.init(ONE), []
    for t in range(1, 25):
        counts = {name: len(level.calls) for name, level in levels.items()}
        params, state = tx.average(params, state, replicas=levels)
        seen += [(t, name) for name, level in levels.items() if len(level.calls) > counts[name]]
    expected = [
        (t, "world" if t % 12 == 0 else "node" if t % 4 == 0 else "chip") for t in range(2, 25, 2)
    ]
    assert seen == expected


def test_an_averager_is_given_the_step():
    seen = []

    def average(params, state, *, step, now):
        seen.append((int(step), bool(now)))
        return params, state

    tx = mt.periodic(mt.Transform(lambda params: mt.EmptyState(), average=average), every=3)
    state = tx.init(ONE)
    for t in range(1, 8):
        _, state = tx.average(ONE, state, now=t == 7)
    assert seen == [(3, False), (6, False), (7, True)]
    with pytest.raises(TypeError, match="'step'"):  # periodic provides it
        tx.average(ONE, state, step=3)


# --- outer -----------------------------------------------------------------------------------


def test_small_outer_steps_of_bfloat16():
    """Around 256 bfloat16 has a spacing of 2: steps of 0.4 must add up in the anchor."""
    tx = mt.outer(mt.chain(mt.mean(), mt.sgd(0.1)))
    params = torch.tensor([256.0], dtype=torch.bfloat16)
    state = tx.init(params)
    assert state.anchor.dtype == torch.float32
    for _ in range(20):
        # the replica moves 4 down from wherever the anchor is
        local = (state.anchor - 4.0).to(torch.bfloat16)
        before = state.anchor
        params, state = tx.average(local, state, replicas=mt.Solo())
        assert params.dtype == torch.bfloat16
        moved = float(before - state.anchor)
        assert 0.2 <= moved <= 0.6  # 0.4 up to the rounding of `local`
    assert abs(float(state.anchor) - 248.0) < 1.0
    assert abs(float(params) - 248.0) <= 1.0


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_anchor_never_aliases_the_parameters(dtype, donate):
    tx = mt.outer(mt.chain(mt.mean(), mt.sgd(0.5, momentum=0.9)))
    params = {"w": torch.ones(3, dtype=dtype), "b": torch.ones((), dtype=dtype)}
    state = tx.init(params)

    def check():
        mine = {x.data_ptr() for x in params.values()}
        assert not mine & {x.data_ptr() for x in mt.tree.leaves(state)}
        before = mt.tree.copy(state.anchor)
        for x in params.values():
            x.sub_(1.0)  # as an optimizer of torch.optim does
        torch.testing.assert_close(state.anchor, before, rtol=0, atol=0)

    check()
    for _ in range(3):
        params, state = tx.average(params, state, replicas=mt.Solo(), donate=donate)
        check()


def test_anchor_of_parameters_is_no_leaf_of_a_graph():
    params = {"w": torch.nn.Parameter(torch.ones(3))}
    state = mt.outer(mt.chain(mt.mean(), mt.sgd(0.5))).init(params)
    assert not state.anchor["w"].requires_grad
    assert type(state.anchor["w"]) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_outer_refuses_integers(dtype):
    params = {"w": torch.ones(2), "steps": [torch.zeros(1, dtype=dtype)]}
    tx = mt.diloco(mt.sgd(0.1), every=2)
    with pytest.raises(TypeError, match=rf"\['steps'\]\[0\] is {dtype}"):
        tx.init(params)
    with pytest.raises(TypeError, match="the parameter is"):
        tx.init(torch.zeros(1, dtype=dtype))


def test_outer_sgd_of_1_is_averaging():
    tx, plain = mt.outer(mt.chain(mt.mean(), mt.sgd(1.0))), mt.average_params()
    params = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(tx):
        def one(params):
            state = tx.init(torch.zeros(3, dtype=torch.float64))
            return tx.average(params, state, replicas=mt.Vmapped(4))[0]

        return vmap(one)(params)

    torch.testing.assert_close(run(tx), run(plain))


def test_members_before_the_mean_are_local():
    """Clipping before the mean bounds each replica's message, after it the mean."""
    params = torch.tensor([[10.0], [0.0], [0.0], [0.0]])

    def run(tx):
        def one(params):
            return tx.average(params, tx.init(torch.zeros(1)), replicas=mt.Vmapped(4))[0]

        return vmap(one)(params).flatten().tolist()

    assert run(mt.outer(mt.chain(mt.clip(1.0), mt.mean(), mt.sgd(1.0)))) == [0.25] * 4
    assert run(mt.outer(mt.chain(mt.mean(), mt.clip(1.0), mt.sgd(1.0)))) == [1.0] * 4


# --- slow momentum -----------------------------------------------------------------------------


def test_slow_momentum_divides_by_the_rate():
    zero = mt.slow_momentum(0.0)
    with pytest.raises(ValueError, match=r"which is 0.0.*keep it positive"):
        zero.update(ONE, zero.init(ONE))
    tx = mt.slowmo(mt.sgd(0.1), mt.schedules.linear(0.1, 0.0, steps=3), every=2)
    params, state = ONE, tx.init(ONE)
    for _ in range(3):
        params, state = mt.step(tx, torch.ones(1), params, state, replicas=mt.Solo())
    with pytest.raises(ValueError, match="divides by the inner learning rate"):
        mt.step(tx, torch.ones(1), params, state, replicas=mt.Solo())


def test_slow_momentum_needs_the_step_for_a_schedule():
    tx = mt.slow_momentum(mt.schedules.constant(0.1))
    with pytest.raises(TypeError, match="periodic"):
        tx.update(ONE, tx.init(ONE))
    tx.update(ONE, tx.init(ONE), step=1)
    # outside of periodic nobody provides it
    alone = mt.outer(mt.chain(mt.mean(), tx))
    with pytest.raises(TypeError, match="periodic"):
        alone.average(ONE, alone.init(ONE), replicas=mt.Solo())


def test_slow_momentum_reads_the_rate_of_the_last_local_step():
    read = []

    def rate(step):
        read.append(int(step))
        return 0.1

    tx = mt.slowmo(mt.identity(), rate, every=3)
    params, state = ONE, tx.init(ONE)
    for _ in range(6):
        params, state = tx.average(params, state, replicas=mt.Solo())
    assert read == [2, 5]


def test_slowmo_without_momentum_is_local_sgd():
    targets = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(tx):
        def replica(target):
            params = torch.zeros(3, dtype=torch.float64)
            state = tx.init(params)
            for _ in range(7):
                params, state = mt.step(tx, params - target, params, state, replicas=mt.Vmapped(4))
            return params

        return vmap(replica)(targets)

    slow = run(mt.slowmo(mt.sgd(0.1, momentum=0.5), 0.1, every=3, momentum=0.0))
    torch.testing.assert_close(slow, run(mt.local_sgd(mt.sgd(0.1, momentum=0.5), every=3)))


# --- what is not finite, and weights -------------------------------------------------------------


def averaged(tx, params, weights=None):
    """Of all replicas: the parameters and how many messages were rejected."""
    size = len(params["w"])

    def one(params, weight):
        extra = {} if weights is None else {"weight": weight}
        new, state = tx.average(params, tx.init(params), replicas=mt.Vmapped(size), **extra)
        return new, mt.find(state, mt.MeanState).rejected

    return vmap(one)(params, torch.ones(size) if weights is None else torch.tensor(weights))


BAD_VALUES = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", BAD_VALUES)
def test_one_replica_that_is_not_finite(value):
    """It is left out, receives the mean of the others and says so."""
    params = {
        "w": torch.tensor([[1.0, 2.0], [3.0, value], [5.0, 6.0]]),
        "b": torch.tensor([0.0, 30.0, 6.0]),  # finite, but of the same message
        "n": torch.tensor([1, 9, 4]),
    }
    new, rejected = averaged(mt.average_params(), params)
    assert new["w"].tolist() == [[3.0, 4.0]] * 3
    assert new["b"].tolist() == [3.0] * 3
    assert new["n"].tolist() == [9] * 3
    assert rejected.tolist() == [0, 1, 0]


@pytest.mark.parametrize("value", BAD_VALUES)
def test_all_replicas_not_finite(value):
    """There is nothing to average: everyone keeps what it has."""
    params = {"w": torch.tensor([[1.0, value], [value, 2.0]]), "b": torch.tensor([1.0, 2.0])}
    new, rejected = averaged(mt.average_params(), params)
    torch.testing.assert_close(new, params, rtol=0, atol=0, equal_nan=True)
    assert rejected.tolist() == [1, 1]


def test_pseudo_gradients_that_are_not_finite():
    """In `outer` the anchor survives, and the replica restarts from it."""
    tx = mt.outer(mt.chain(mt.mean(), mt.sgd(1.0)))
    start = torch.zeros(2)

    def one(params):
        new, state = tx.average(params, tx.init(start), replicas=mt.Vmapped(2))
        return new, mt.find(state, mt.MeanState).rejected

    nan = float("nan")
    new, rejected = vmap(one)(torch.tensor([[1.0, 2.0], [nan, 0.0]]))
    assert new.tolist() == [[1.0, 2.0]] * 2
    assert rejected.tolist() == [0, 1]
    new, rejected = vmap(one)(torch.full((2, 2), nan))
    assert new.tolist() == [[0.0, 0.0]] * 2  # the anchor
    assert rejected.tolist() == [1, 1]


def test_one_replica_alone_that_is_not_finite():
    tx = mt.average_params()
    params = torch.tensor([float("nan"), 1.0])
    new, state = tx.average(params, tx.init(params), replicas=mt.Solo())
    torch.testing.assert_close(new, params, equal_nan=True, rtol=0, atol=0)
    assert int(state.rejected) == 1


def test_weights():
    params = {"w": torch.tensor([[0.0], [4.0], [100.0]])}
    assert averaged(mt.average_params(), params, [3.0, 1.0, 0.0])[0]["w"].tolist() == [[1.0]] * 3
    # of weight 0: keeps nothing of its own, and may hold anything
    params["w"][2] = float("nan")
    new, rejected = averaged(mt.average_params(), params, [3.0, 1.0, 0.0])
    assert new["w"].tolist() == [[1.0]] * 3
    assert rejected.tolist() == [0, 0, 1]
    # nobody has a weight
    params = {"w": torch.tensor([[0.0], [4.0], [5.0]])}
    new, rejected = averaged(mt.average_params(), params, [0.0, 0.0, 0.0])
    assert torch.equal(new["w"], params["w"])
    assert rejected.tolist() == [0, 0, 0]


def test_weights_of_integers():
    """Numbers of tokens are integers."""
    tx = mt.average_params()
    params = torch.tensor([2.0])
    for weight in (3, torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        new, _ = tx.average(params, tx.init(params), replicas=mt.Solo(), weight=weight)
        assert new.tolist() == [2.0]
    run = vmap(lambda p, w: tx.average(p, tx.init(p), replicas=mt.Vmapped(2), weight=w)[0])
    assert run(torch.tensor([0.0, 4.0]), torch.tensor([3, 1])).tolist() == [1.0, 1.0]


def test_weights_pass_through_recipes():
    params = torch.tensor([[0.0], [4.0]])
    weights = torch.tensor([3.0, 1.0])
    for tx in (
        mt.local_sgd(mt.sgd(1.0), every=1),
        mt.post_local_sgd(mt.sgd(1.0), every=1),
        mt.diloco(mt.sgd(1.0), every=1, learning_rate=1.0, momentum=0.0),
        mt.slowmo(mt.sgd(1.0), 1.0, every=1, momentum=0.0),
    ):

        def one(grad, weight, tx=tx):
            start = torch.zeros(1)
            return mt.step(tx, -grad, start, tx.init(start), replicas=mt.Vmapped(2), weight=weight)[
                0
            ]

        assert vmap(one)(params, weights).tolist() == [[1.0], [1.0]]


def test_mean_of_updates_without_finite_ones_is_zero():
    tx = mt.mean()
    updates, state = tx.update(
        torch.tensor([float("inf")]), tx.init(torch.zeros(1)), replicas=mt.Solo()
    )
    assert updates.tolist() == [0.0]
    assert int(state.rejected) == 1


def test_a_tree_without_leaves():
    for tx in (mt.average_params(), mt.local_sgd(mt.sgd(0.1, momentum=0.9), every=1)):
        params = {"none": None, "empty": ()}
        new, _ = mt.step(tx, params, params, tx.init(params), replicas=mt.Solo())
        assert new == params


# --- warm-up -----------------------------------------------------------------------------------


def test_warmup_then():
    """Gradients over the world first, then within a node."""
    tx = mt.chain(mt.warmup_mean(2, over="world", then="node"), mt.sgd(1.0))
    world = mt.Vmapped(4)
    levels = {"world": world, "node": world.groups(2)}

    def replica(grad):
        params = torch.zeros(())
        state, seen = tx.init(params), []
        for _ in range(3):
            new, state = mt.step(tx, grad, params, state, replicas=levels)
            seen.append(params - new)
            params = new
        return torch.stack(seen)

    assert vmap(replica)(torch.tensor([0.0, 2.0, 10.0, 20.0])).tolist() == [
        [8.0, 8.0, 1.0],
        [8.0, 8.0, 1.0],
        [8.0, 8.0, 15.0],
        [8.0, 8.0, 15.0],
    ]


def test_warmup_of_no_steps_needs_no_replicas():
    tx = mt.chain(mt.warmup_mean(0), mt.sgd(1.0))
    updates, _ = tx.update(torch.ones(1), tx.init(ONE), ONE)
    assert updates.tolist() == [-1.0]


def test_after_the_warmup_nothing_is_communicated():
    tx = mt.post_local_sgd(mt.sgd(1.0), every=3, warmup=2)
    params, state, calls = ONE, tx.init(ONE), []
    for _ in range(8):
        world = mt.Recorded(mt.Solo())
        params, state = mt.step(tx, torch.ones(1), params, state, replicas=world)
        calls.append(len(world.calls))
    assert calls == [1, 1, 0, 0, 1, 0, 0, 1]


# --- a replica that skips an update ------------------------------------------------------------


def test_skipping_an_update_moves_no_schedule():
    """The schedules that decide about communication count calls of `average` alone."""
    tx = mt.post_local_sgd(mt.sgd(0.1), every=mt.schedules.piecewise(2.0, {4: 1.5}), warmup=2)

    def run(skipped):
        params, state, dues, warm = torch.zeros(1), tx.init(torch.zeros(1)), [], []
        for t in range(1, 13):
            world = mt.Recorded(mt.Solo())
            if t not in skipped:
                updates, state = tx.update(torch.ones(1), state, params, replicas=world)
                params = mt.apply_updates(params, updates)
                warm += [t] if world.calls else []
            world = mt.Recorded(mt.Solo())
            params, state = tx.average(params, state, replicas=world)
            dues += [t] if world.calls else []
        return dues, warm, state

    dues, warm, state = run(skipped=())
    other_dues, other_warm, other_state = run(skipped=(1, 4, 5))
    assert dues == other_dues == [4, 7, 10]
    assert (warm, other_warm) == ([1, 2], [2])
    for kind in (mt.PeriodicState, mt.WarmupState):
        ours, theirs = mt.find(state, kind), mt.find(other_state, kind)
        assert int(ours.count) == int(theirs.count) == 12
    assert int(mt.find(state, mt.PeriodicState).due) == 13
    assert int(mt.find(other_state, mt.PeriodicState).due) == 13


# --- forced synchronisations -----------------------------------------------------------------


def world_steps(tx, steps, **forced):
    """The steps after which the world, not only the node, is averaged over."""
    params, state, found = ONE, tx.init(ONE), []
    for step in range(1, steps + 1):
        levels = {"node": mt.Recorded(mt.Solo()), "world": mt.Recorded(mt.Solo())}
        now = step == forced.get("now")
        params, state = tx.average(params, state, replicas=levels, now=now)
        if step == forced.get("between"):
            params, state = tx.average(params, state, replicas=levels, now=True, counts=False)
        found += [step] if levels["world"].calls else []
    return found


HIERARCHY = mt.hierarchical_sgd(mt.identity(), every={"node": 4, "world": 16})
NESTED = mt.periodic(mt.periodic(mt.average_params("world"), every=4), every=4)


@pytest.mark.parametrize("tx", [HIERARCHY, NESTED], ids=["alternate", "periodic"])
@pytest.mark.parametrize("step", [3, 4, 15, 16, 17])
def test_a_forced_synchronisation_moves_no_other_on_any_level(tx, step):
    assert world_steps(tx, 33) == [16, 32]
    assert world_steps(tx, 33, now=step) == sorted({step, 16, 32})


@pytest.mark.parametrize("tx", [HIERARCHY, NESTED], ids=["alternate", "periodic"])
@pytest.mark.parametrize("step", [3, 4, 16])
def test_a_synchronisation_between_steps_is_none(tx, step):
    assert world_steps(tx, 33, between=step) == sorted({step, 16, 32})


def test_a_synchronisation_between_steps_does_not_shorten_the_warmup():
    tx = mt.post_local_sgd(mt.sgd(0.1), every=2, warmup=3)
    state = tx.init(ONE)
    _, state = tx.average(ONE, state, replicas=mt.Solo(), now=True, counts=False)
    assert mt.find(state, mt.WarmupState).count == 0
    assert mt.find(state, mt.PeriodicState).count == 0
