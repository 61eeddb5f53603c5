"""`mt.compile`: the same numbers, one graph, in place on request."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import meantime as mt
from tests.zoo import ZOO

RULES = {
    "chain": ZOO["chain"],
    "adam_scheduled": ZOO["adam_scheduled"],
    "sgd_momentum": ZOO["sgd_momentum"],
}


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled, without the C++ compiler."""
    counter = CompileCounterWithBackend("eager")
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiler(f, backend=counter, **options)
    )
    torch._dynamo.reset()
    return counter


def tree(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 2, generator=generator), "b": torch.randn((), generator=generator)}


@pytest.mark.parametrize("donate", [False, True])
def test_a_tree_without_leaves(donate):
    tx = mt.compile(mt.lion(0.1))
    params = {"frozen": None}
    assert mt.step(tx, params, params, tx.init(params), donate=donate)[0] == params


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_same_numbers_from_one_graph(name, donate, graphs):
    plain = RULES[name]()

    def update(updates, state, params=None):  # without the fused kernel, which would be used
        return plain.update(updates, state, params)

    compiled = mt.compile(mt.Transform(plain.init, update, plain.average))
    params, state = tree(0), plain.init(tree(0))
    ours = {name: x.clone() for name, x in params.items()}
    its_state = compiled.init(ours)
    for step in range(4):
        params, state = mt.step(plain, tree(step + 1), params, state, replicas=mt.Solo())
        before = ours["w"]
        ours, its_state = mt.step(
            compiled, tree(step + 1), ours, its_state, replicas=mt.Solo(), donate=donate
        )
        assert (ours["w"].data_ptr() == before.data_ptr()) == donate
    for x, y in zip(
        mt.tree.leaves((params, state)), mt.tree.leaves((ours, its_state)), strict=True
    ):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y)
    assert graphs.frame_count == 1


def test_fused_kernels_and_other_transformations_come_first(graphs):
    tx = mt.compile(mt.adamw(0.1))
    params = tree(0)
    mt.step(tx, tree(1), params, tx.init(params))
    assert graphs.frame_count == 0

    tx = mt.compile(mt.chain(mt.clip(0.5), mt.scale(-0.1)))
    batch = torch.stack([torch.ones(3), 2 * torch.ones(3)])
    moved = torch.func.vmap(lambda g: mt.step(tx, g, g, tx.init(g))[0])(batch)
    assert torch.allclose(moved, batch - 0.05)
    leaf = torch.ones(2, requires_grad=True)
    mt.step(tx, 0.1 * leaf, leaf, tx.init(leaf))[0].sum().backward()
    assert torch.allclose(leaf.grad, torch.full((2,), 0.99))
    assert graphs.frame_count == 0

    updates, _ = tx.update(params, tx.init(params), params)
    assert torch.allclose(updates["b"], -0.1 * params["b"].clamp(-0.5, 0.5))
    assert graphs.frame_count == 1
    assert mt.compile(mt.average_params()).average is not None


def test_numbers_among_the_arguments_make_no_graphs(graphs):
    def update(updates, state, params=None, *, value):
        return mt.tree.map(lambda u: u * value, updates), state

    tx = mt.compile(mt.Transform(lambda params: mt.EmptyState(), update))
    for value in (0.5, 0.25, 0.125):
        updates, _ = tx.update([torch.ones(2)], mt.EmptyState(), value=value)
        assert updates[0].tolist() == [value, value]
    assert graphs.frame_count == 1


def test_on_jax():
    jax = pytest.importorskip("jax")
    plain = mt.chain(mt.clip(0.5), mt.trace(0.9), mt.scale(-0.1))
    tx = mt.compile(plain)
    params = {"w": jax.numpy.arange(3.0)}
    state, expected, its_state = tx.init(params), params, plain.init(params)
    for _ in range(3):
        expected, its_state = mt.step(plain, params, expected, its_state)
    ours = jax.tree.map(jax.numpy.copy, params)
    for _ in range(3):
        before = ours["w"]
        ours, state = mt.step(tx, params, ours, state, replicas=mt.Solo(), donate=True)
        assert before.is_deleted()
    assert jax.numpy.allclose(ours["w"], expected["w"])
    inside = jax.jit(lambda g: mt.step(tx, g, g, tx.init(g))[0])({"w": jax.numpy.ones(2)})
    assert jax.numpy.allclose(inside["w"], 0.95)


def test_one_kernel_of_the_real_compiler():
    tx = mt.compile(mt.chain(mt.clip(0.5), mt.scale(-0.1)))
    params, grads = torch.zeros(1000), torch.linspace(-1, 1, 1000)
    state = tx.init(params)
    moved, _ = mt.step(tx, grads, params, state, donate=True)
    assert moved is params
    assert torch.allclose(params, -0.1 * grads.clamp(-0.5, 0.5))
    with pytest.raises(TypeError, match="expected a transform"):
        mt.compile(torch.nn.Linear)
