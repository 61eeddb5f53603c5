"""The parts of federated learning and of the inner state: what laws of trainings do not say."""

from __future__ import annotations

import pytest
import torch

import meantime as mt
from meantime.testing.cases import vmapped

linear = mt.schedules.linear


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mt.restart(mt.local_sgd(mt.sgd(0.1), 2)), TypeError, r"sgd\(0.1\).* averages"),
        (lambda: mt.desloc(mt.adam(0.1), every=0), ValueError, "every must be at least 1"),
        (lambda: mt.desloc(mt.adam(0.1), 2, {"mu": 0}), ValueError, "every must be at least 1"),
        (
            lambda: mt.desloc(mt.adam(0.1), 2, {"trace": 4}).init(torch.ones(2)),
            ValueError,
            r"no field 'trace'; it has \['count', 'mu', 'nu'\]",
        ),
        (
            lambda: mt.average_state(mt.adam(0.1), {"count": mt.average_params()}).init(
                torch.ones(2)
            ),
            TypeError,
            "'count' holds torch.int32",
        ),
        (
            lambda: mt.proximal(mt.periodic(mt.average_params(), 2), 1.0).init(torch.ones(2)),
            TypeError,
            r"write periodic\(proximal",
        ),
        (lambda: mt.proximal(mt.average_params(), -1.0), ValueError, "strength .* -1.0"),
        (
            lambda: mt.fedprox(mt.sgd(0.1), 2, 0.5).update(
                torch.ones(2), mt.fedprox(mt.sgd(0.1), 2, 0.5).init(torch.ones(2))
            ),
            ValueError,
            "proximal needs the parameters",
        ),
        (lambda: mt.scaffold(0.0), ValueError, "learning_rate must be positive"),
        (lambda: mt.scaffold(0.1, -1.0), ValueError, "server_learning_rate .* -1.0"),
        (
            lambda: mt.scaffold(0.1).init({"w": torch.ones(2), "n": torch.ones(2).int()}),
            TypeError,
            r"scaffold.*\['n'\] is torch.int32",
        ),
        (
            lambda: mt.fednova().average(torch.ones(2), mt.fednova().init(torch.ones(2))),
            TypeError,
            "fednova has to communicate",
        ),
        (lambda: mt.scale_by_server_moments("sgd"), ValueError, "'adagrad', got 'sgd'"),
        (lambda: mt.fedadam(mt.sgd(0.1), 2, 0.1, tau=0.0), ValueError, "tau must be positive"),
        (lambda: mt.fedyogi(mt.sgd(0.1), 2, 0.1, b1=2.0), ValueError, r"b1 must be in \[0, 1\]"),
    ],
)
def test_errors(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("part", [mt.scaffold(0.1), mt.fednova(), mt.desloc(mt.adam(0.1), 1)])
def test_a_tree_without_leaves(part):
    tx = mt.chain(part, mt.sgd(0.1))
    params, _ = mt.step(tx, {"a": None}, {"a": None}, tx.init({"a": None}), replicas=mt.Solo())
    assert params == {"a": None}


def test_schedules_begin_again():
    """As those of a new optimizer do."""
    tx = mt.fedavg(mt.sgd(linear(1.0, 0.0, steps=4)), every=3)
    params, state, moves = torch.zeros(()), tx.init(torch.zeros(())), []
    for _ in range(6):
        before = params
        params, state = mt.step(tx, torch.ones(()), params, state, replicas=mt.Solo())
        moves.append(float(before - params))
    assert moves == pytest.approx([1.0, 0.75, 0.5] * 2)


def test_fields_of_a_name_are_averaged_together():
    """Those of all members of a partition, in one message; other fields stay."""
    inner = mt.partition({0: mt.adam(0.1), 1: mt.lion(0.1)}, lambda params: {"a": 0, "b": 1})
    tx = mt.average_state(inner, {"mu": mt.average_params()})

    def one_step(grads):
        world = mt.Recorded(mt.Vmapped(2))
        state = mt.step(tx, grads, grads, tx.init(grads), replicas=world)[1]
        assert len(world.calls) == 1
        return mt.find(state, mt.AdamState), mt.find(state, mt.LionState)

    adam, lion = vmapped(one_step, {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([2.0, 6.0])})
    torch.testing.assert_close(adam.mu["a"], torch.full((2,), 0.2))
    torch.testing.assert_close(adam.nu["a"], torch.tensor([1e-3, 9e-3]))
    torch.testing.assert_close(lion.mu["b"], torch.full((2,), 0.04))


def test_moments_of_optax():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    tx = mt.desloc(optax.adam(0.1), every=2, periods={"nu": 1})

    def one_step(grads):
        params, state = mt.step(tx, grads, grads, tx.init(grads), replicas=mt.NamedAxis("replica"))
        return params, state[0].inner[0]

    grads = jax.numpy.array([1.0, 3.0])
    params, adam = jax.jit(jax.vmap(one_step, axis_name="replica"))(grads)
    assert adam.nu.tolist() == pytest.approx([5e-3] * 2)
    assert adam.mu.tolist() == pytest.approx([0.1, 0.3])
    assert adam.count.tolist() == [1, 1]
    assert params.tolist() == pytest.approx([0.9, 2.9], abs=1e-5)
