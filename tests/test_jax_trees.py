"""Trees whose nodes only JAX knows: equinox modules, flax states and classes of one's own."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

import meantime as mt

jax = pytest.importorskip("jax")
equinox = pytest.importorskip("equinox")
flax = pytest.importorskip("flax")
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

GRAD = 0.5


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """A node with names for its children and something static."""

    def __init__(self, weight, bias, width):
        self.weight, self.bias, self.width = weight, bias, width

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("weight"), self.weight), (key("bias"), self.bias)), self.width

    @classmethod
    def tree_unflatten(cls, width, children):
        return cls(*children, width)


@jax.tree_util.register_pytree_node_class
class Anonymous:
    """A node without names, and maybe without children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def a(*shape):
    return jnp.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)


TREES = {
    "equinox": lambda: equinox.filter(
        equinox.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)), equinox.is_inexact_array
    ),
    "linen": lambda: flax.linen.Dense(3).init(jax.random.key(0), a(2)),
    "frozen dict": lambda: flax.core.freeze({"dense": {"kernel": a(2, 3), "bias": None}}),
    "nnx": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param),
    "own": lambda: {"layers": [Layer(a(2, 3), None, 3), Layer(a(3), a(1), 1)]},
    "nested": lambda: Pair(Anonymous(Layer(a(2), Anonymous(), 2), (a(1),)), Anonymous(None, a())),
}


@pytest.fixture(params=TREES)
def params(request):
    return TREES[request.param]()


def train(tx, params, steps=3):
    """Every gradient is `GRAD` times the parameter."""

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: sum(GRAD / 2 * (x * x).sum() for x in jax.tree.leaves(p)))
        return mt.step(tx, grads(params), params, state, replicas=mt.Solo())

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def recipe():
    return mt.diloco(mt.chain(mt.clip_by_global_norm(1.0), mt.adamw(0.1)), every=2)


def test_is_trained_like_its_leaves(params):
    trained, state = train(recipe(), params)
    leaves, flat_state = train(recipe(), jax.tree.leaves(params))
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    assert jax.tree.structure(mt.find(state, mt.OuterState).anchor) == jax.tree.structure(params)
    for x, y in zip(
        jax.tree.leaves((trained, state)), jax.tree.leaves((leaves, flat_state)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def test_leaves_come_in_the_order_of_jax(params):
    assert [x is y for x, y in zip(mt.tree.leaves(params), jax.tree.leaves(params), strict=True)]
    labels = mt.fragments(1)(params)
    assert jax.tree.structure(labels) == jax.tree.structure(params)


def test_checkpoint(params):
    tx = recipe()
    _, state = train(tx, params)
    saved = mt.state_dict(state)
    restored = mt.load_state_dict(tx.init(params), saved)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert all(x is y for x, y in zip(jax.tree.leaves(restored), saved.values(), strict=True))


def test_paths_name_the_children():
    tree = {"layers": [Layer(a(2), a(1), 2)], "x": Anonymous(a(1))}
    assert mt.tree.paths(tree)[0] == "['layers'][0].weight"
    keys = mt.state_dict({"layers": TREES["own"]()["layers"], "x": Anonymous(a(1))})
    assert list(keys) == ["layers.0.weight", "layers.1.weight", "layers.1.bias", "x.0"]


def test_other_static_data_is_another_structure():
    params, grads = Layer(a(2), None, 2), Layer(a(2), None, 3)
    tx = mt.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match="differ in structure"):
        tx.update(grads, tx.init(params), params)


def test_what_nobody_knows_is_refused_by_name():
    class Unknown:
        pass

    with pytest.raises(TypeError, match=r"\['a'\].*Unknown"):
        mt.adam(0.1).init({"a": Unknown()})


def test_masked_out_leaves_count_in_jax():
    """optax's own node in the place of a leaf; and a part without any leaf."""
    optax = pytest.importorskip("optax")
    params = {"a": a(2), "b": a(1)}
    labels = {"a": "used", "b": "used"}
    members = {"used": mt.adam(0.1), "unused": mt.sgd(0.1, momentum=0.9)}
    expected, _ = train(mt.adam(0.1), params)
    for tx in (optax.partition(members, labels), mt.partition(members, labels)):
        trained, _ = train(tx, params)
        assert jnp.array_equal(trained["a"], expected["a"])


def test_flax_train_state_and_nnx_optimizer():
    tx = mt.adam(0.1)
    model = flax.linen.Dense(3)
    start = model.init(jax.random.key(0), a(2))
    ts = TrainState.create(apply_fn=model.apply, params=start, tx=tx)
    ts = jax.jit(lambda ts: ts.apply_gradients(grads=ts.params))(ts)

    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.update(linear, {name: nnx.Param(x) for name, x in start["params"].items()})
    optimizer = nnx.Optimizer(linear, tx, wrt=nnx.Param)
    optimizer.update(linear, nnx.state(linear, nnx.Param))

    updates, _ = tx.update(start, tx.init(start), start)
    expected = mt.apply_updates(start, updates)["params"]
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(ts.params["params"][name], expected[name], rtol=1e-6)
        np.testing.assert_allclose(getattr(linear, name)[...], expected[name], rtol=1e-6)


def test_core_stays_without_jax():
    """A tree of torch tensors imports no JAX, and neither does the module that knows its nodes."""
    code = (
        "import sys, torch, meantime as mt; tx = mt.diloco(mt.sgd(0.1), every=2); p = {'a': "
        "torch.ones(2)}; mt.step(tx, p, p, tx.init(p), replicas=mt.Solo()); "
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'optax', 'flax')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
