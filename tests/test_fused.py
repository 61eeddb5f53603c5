"""`step` with a fused kernel against `update`, `apply_updates`, `average` with the formulas."""

import pytest
import torch

import meantime as mt
from meantime import schedules

RULES = {
    "sgd": lambda: mt.sgd(0.1),
    "momentum": lambda: mt.sgd(0.1, momentum=0.9),
    "nesterov": lambda: mt.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": lambda: mt.sgd(schedules.linear(0.1, 0.01, 9), momentum=0.9, dampening=0.3),
    "adam": lambda: mt.adam(0.1, b1=schedules.linear(0.8, 0.9, 5)),
    "adamw": lambda: mt.adamw(schedules.cosine(0.1, 30), weight_decay=0.1),
    "clipped": lambda: mt.local_sgd(
        mt.chain(mt.clip_by_global_norm(0.5), mt.adamw(torch.tensor(0.1))), every=3
    ),
    "restarted": lambda: mt.fedavg(mt.adamw(0.1), every=3),
    "moments averaged": lambda: mt.desloc(mt.adamw(0.1), every=3),
    "diloco": lambda: mt.diloco(mt.adamw(0.1), every=3),
}


def tree(dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"a": draw(3), "b": [draw(2, 2), draw(0)], "c": draw(), "none": None}


def assert_close(a, b, dtype):
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for x, y in zip(mt.tree.leaves(a), mt.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_equals_the_formulas(name, dtype):
    tx, world = RULES[name](), mt.Solo()
    assert name == "diloco" or hasattr(tx.update, "apply")
    params = fused = tree(dtype, 0)
    state = fused_state = tx.init(params)
    for number in range(10):
        grads = tree(dtype, number + 1)
        updates, state = tx.update(grads, state, params, replicas=world)
        params = mt.apply_updates(params, updates)
        params, state = tx.average(params, state, replicas=world)
        fused, fused_state = mt.step(tx, grads, fused, fused_state, replicas=world)
    assert_close(params, fused, dtype)
    assert_close(state, fused_state, dtype)


@pytest.mark.parametrize("name", RULES)
def test_donation_gives_the_same_bits_and_writes_in_place(name):
    tx, world = RULES[name](), mt.Solo()
    params, donated = tree(torch.float32, 0), tree(torch.float32, 0)
    state, donated_state = tx.init(params), tx.init(donated)
    places = [x.data_ptr() for x in mt.tree.leaves(donated)]
    for number in range(2):
        grads = tree(torch.float32, number + 1)
        before = mt.tree.copy((grads, params, state))
        following, following_state = mt.step(tx, grads, params, state, replicas=world)
        for x, y in zip(
            mt.tree.leaves(before), mt.tree.leaves((grads, params, state)), strict=True
        ):
            assert torch.equal(x, y)
        params, state = following, following_state
        donated, donated_state = mt.step(
            tx, grads, donated, donated_state, replicas=world, donate=True
        )
    for x, y in zip(
        mt.tree.leaves((params, state)), mt.tree.leaves((donated, donated_state)), strict=True
    ):
        assert torch.equal(x, y)
    assert places == [x.data_ptr() for x in mt.tree.leaves(donated)]


def test_falls_back_where_the_kernel_does_not_go():
    tx = mt.adamw(0.1)
    mixed = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}
    params, state = mt.step(tx, mixed, mixed, tx.init(mixed))
    updates, expected_state = tx.update(mixed, tx.init(mixed), mixed)
    expected = mt.apply_updates(mixed, updates)
    assert all(torch.equal(params[name], expected[name]) for name in mixed)
    assert torch.equal(state[0].nu["b"], expected_state[0].nu["b"])


def test_keeps_the_graph_of_parameters_that_require_gradients():
    tx = mt.sgd(0.1)
    params = torch.ones(2, requires_grad=True)
    moved, _ = mt.step(tx, 2 * params, params, tx.init(params))
    moved.sum().backward()
    assert torch.allclose(params.grad, torch.full((2,), 0.8))


def test_what_was_learnt_of_one_tree_is_not_taken_for_another():
    tx = mt.adamw(0.1)

    def reference(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return mt.apply_updates(params, updates)

    square, shared = torch.ones(2, 3), torch.ones(2)
    image = torch.ones(2, 2, 3, 3).to(memory_format=torch.channels_last)
    for params, grads in [
        ([square], [torch.arange(6.0).reshape(2, 3)]),
        ([square], [torch.arange(6.0).reshape(3, 2).t()]),  # laid out otherwise
        ([square.double()], [torch.ones(2, 3).double()]),
        ({"a": square}, {"a": torch.ones(2, 3)}),
        ([torch.ones(6)], [torch.arange(6.0)]),
        ([image], [torch.randn(2, 2, 3, 3)]),
        ([shared, shared], [torch.ones(2), -torch.ones(2)]),
        ([square], [torch.arange(6.0).reshape(2, 3)]),
    ]:
        for _ in range(2):
            moved, _ = mt.step(tx, grads, params, tx.init(params))
            assert_close(moved, reference(params, grads), mt.tree.leaves(params)[0].dtype)

    # The same objects with other contents.
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            parameter.data = parameter.data.to(dtype)
            grads = [torch.arange(3, dtype=dtype)]
            moved, _ = mt.step(tx, grads, [parameter], tx.init([parameter]))
            assert_close(moved, reference([parameter], grads), dtype)
    moved, _ = mt.step(tx, grads, [parameter], tx.init([parameter]))
    assert moved[0].requires_grad
