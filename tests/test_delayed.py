"""Results that arrive some steps after they were sent."""

from __future__ import annotations

import math

import pytest
import torch

import meantime as mt


def steps(tx, params, state, moves):
    found = []
    for move in moves:
        params, state = tx.average(params + move, state, replicas=mt.Solo())
        found.append(params.item())
    return found, params, state


def towards_a_hundred():
    """An averager that puts 100 in the place of the parameters."""
    return mt.Transform(
        lambda params: mt.EmptyState(), average=lambda params, state: (params * 0 + 100, state)
    )


@pytest.mark.parametrize(
    ("delay", "merge", "expected"),
    [
        (0, 0.5, [1, 2, 100, 101, 102, 100, 101, 102]),
        (1, 0.0, [1, 2, 3, 100, 101, 102, 100, 101]),
        (2, 0.5, [1, 2, 3, 4, 52.5, 53.5, 54.5, 77.75]),
        (2, "delta", [1, 2, 3, 4, 102, 103, 104, 102]),
        # What is still under way when the next one begins arrives right before it.
        (4, 0.0, [1, 2, 3, 4, 5, 100, 101, 102]),
    ],
)
def test_when_and_how_it_arrives(delay, merge, expected):
    tx = mt.delayed(mt.periodic(towards_a_hundred(), every=3), delay, merge)
    params = torch.zeros(())
    assert steps(tx, params, tx.init(params), [1] * 8)[0] == expected


def test_saved_and_resumed_while_it_is_under_way():
    tx = mt.delayed(
        mt.periodic(mt.outer(mt.sgd(0.5, momentum=0.9)), every=3), steps=2, merge="delta"
    )
    params = torch.zeros(())
    moves = [1.0, 3.0, -2.0, 0.5, 4.0, 1.0, 1.0, -7.0, 2.0]
    wanted = steps(tx, params, tx.init(params), moves)[0]
    for cut in range(1, len(moves)):
        before, there, state = steps(tx, params, tx.init(params), moves[:cut])
        state = mt.load_state_dict(tx.init(params), mt.state_dict(state))
        assert before + steps(tx, there, state, moves[cut:])[0] == wanted


def test_calls_that_count_no_step_bring_nothing_nearer():
    tx = mt.delayed(mt.periodic(towards_a_hundred(), every=1), steps=2)
    params = torch.zeros(())
    params, state = tx.average(params, tx.init(params))
    for _ in range(3):
        params, state = tx.average(params, state, counts=False)
    assert (params.item(), state.left.item()) == (0, 2)


def test_donated_parameters_do_not_change_what_is_under_way():
    tx = mt.delayed(mt.periodic(mt.average_params(), every=1), steps=1, merge="delta")
    params = torch.ones(3)
    params, state = tx.average(params, tx.init(params), replicas=mt.Solo(), donate=True)
    params.fill_(7.0)
    assert state.pending.tolist() == state.sent.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mt.delayed(mt.periodic(mt.swa(), 2), -1), ValueError, "steps must be at least 0"),
        (lambda: mt.delayed(mt.periodic(mt.swa(), 2), 1.5), TypeError, "steps must be an integer"),
        (lambda: mt.delayed(mt.periodic(mt.swa(), 2), 1, 1.5), ValueError, "merge must be in"),
        (lambda: mt.delayed(mt.periodic(mt.swa(), 2), 1, "sum"), TypeError, "merge must be"),
        (
            lambda: mt.delayed(mt.average_params(), 1).init(torch.zeros(1)),
            TypeError,
            r"got average_params\(\)",
        ),
        (lambda: mt.adacomm(0, block=1), ValueError, "initial must be at least 1"),
        (lambda: mt.adacomm(1, block=2.5), TypeError, "block must be an integer"),
        (lambda: mt.overlapped(pull=2.0), ValueError, "pull must be in"),
        (lambda: mt.delayed_nesterov(0.1, every=4, c=0.5), ValueError, r"c must be in \[0, 0.25\]"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_adacomm_wants_the_loss():
    tx = mt.local_sgd(mt.sgd(0.1), every=mt.adacomm(1, block=1))
    params = torch.zeros(1)
    with pytest.raises(TypeError, match="pass value="):
        tx.average(params, tx.init(params), replicas=mt.Solo())


def test_adacomm_ignores_a_loss_that_is_not_finite():
    tx = mt.periodic(mt.swa(), every=mt.adacomm(8, block=1))
    params = torch.zeros(1)
    state = tx.init(params)
    for value in [math.nan] * 8 + [1.0] * 8 + [math.inf] * 8 + [0.25] * 8:
        params, state = tx.average(params, state, value=torch.tensor(value), replicas=mt.Solo())
    # The first one that is finite is what the others are compared with: 8 sqrt(1 / 4).
    assert (state.policy.first.item(), state.policy.period.item()) == (1.0, 4)


def test_replicas_of_different_speed():
    """Outer momentum on every arrival goes astray where that of every round does not.

    Each replica makes ten local steps towards an optimum of its own, in one to four units of
    time, sends what it did and starts again from the anchor as it then is.
    """
    optima = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    speeds = [1, 2, 3, 4]

    def largest_error(rule):
        tx = mt.outer(rule)
        anchor = torch.tensor(20.0)
        state = tx.init(anchor)
        starts, errors = [anchor] * 4, []
        for time in range(1, 241):
            for k in range(4):
                if time % speeds[k] == 0:
                    params = starts[k]
                    for _ in range(10):
                        params = params - 0.05 * (params - optima[k])
                    delta = starts[k] - params
                    # `outer` forms the difference from the present anchor.
                    anchor, state = tx.average(state.anchor - delta, state)
                    starts[k] = anchor
            errors.append(abs(anchor.item()))
        return max(errors[120:])

    every_arrival = largest_error(mt.chain(mt.scale(1 / 4), mt.sgd(0.7, 0.9, nesterov=True)))
    every_round = largest_error(mt.delayed_nesterov(0.7, every=4, momentum=0.9))
    assert every_round < every_arrival / 2
