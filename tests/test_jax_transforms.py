"""Every transform under JAX's transformations: `jit`, `scan`, `grad`, `vmap`, `shard_map`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import meantime as mt
from tests import worlds
from tests.zoo import LEVELLED, ZOO

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS = 6
SOLO = mt.Solo()
NAMES = list(ZOO)


def numbers(*leading: int, seed: int = 0) -> dict:
    """A tree of float32, with leading axes."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(*leading, *shape)).astype(np.float32)

    return {"w": normal(3, 2), "b": [normal(2)], "scale": normal()}


def arrays(*leading: int, seed: int = 0) -> dict:
    return jax.tree.map(jnp.asarray, numbers(*leading, seed=seed))


def tensors(*leading: int, seed: int = 0) -> dict:
    return jax.tree.map(torch.from_numpy, numbers(*leading, seed=seed))


def levels(name: str, node, world):
    return {"node": node, "world": world} if name in LEVELLED else world


def communicates(name: str) -> bool:
    world = mt.Recorded(SOLO)
    tx, params = ZOO[name](), tensors()
    looped(tx, levels(name, world, world), params, tensors(STEPS))
    return bool(world.calls)


def scanned(tx, replicas, params, grads):
    """The parameters and the state after a `scan` over the leading axis of the gradients."""

    def body(carry, g):
        return mt.step(tx, g, *carry, replicas=replicas), None

    return jax.lax.scan(body, (params, tx.init(params)), grads)[0]


def looped(tx, replicas, params, grads, steps=STEPS):
    """The same by a loop, in torch or in JAX."""
    state = tx.init(params)
    for step in range(steps):
        g = mt.tree.map(lambda x, step=step: x[step], grads)
        params, state = mt.step(tx, g, params, state, replicas=replicas)
    return params, state


def assert_close(actual, expected, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, x, y in zip(
        mt.tree.paths(expected), mt.tree.leaves(actual), mt.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=path)


# --- types -----------------------------------------------------------------------------------


def by_one(name, function, *arguments):
    jax.eval_shape(partial(function, levels(name, SOLO, SOLO)), *arguments)


def by_vmap(name, function, *arguments):
    world = mt.NamedAxis("replica")
    function = partial(function, levels(name, world.groups(2), world))
    jax.eval_shape(jax.vmap(function, axis_name="replica"), *stacked(arguments))


def by_shard_map(name, function, *arguments):
    world = mt.NamedAxis(("node", "worker"))
    function = partial(function, levels(name, mt.NamedAxis("worker"), world))
    jax.eval_shape(worlds.sharded(function), *stacked(arguments))


def stacked(values):
    return jax.tree.map(lambda x: jnp.stack([x] * worlds.WORLD), values)


@pytest.mark.parametrize("way", [by_one, by_vmap, by_shard_map])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_keeps_every_type(name, way):
    """Structure, shapes, dtypes, weak types and, in `shard_map`, the axes they vary over."""
    tx, seen = ZOO[name](), []

    def one_step(replicas, params, grads):
        state = tx.init(params)
        after = mt.step(tx, grads, params, state, replicas=replicas)
        seen.append(tuple(jax.tree.map(jax.typeof, carry) for carry in ((params, state), after)))
        return params

    params, grads = arrays(), arrays(seed=1)
    params["w"], grads["w"] = (x["w"].astype(jnp.bfloat16) for x in (params, grads))
    way(name, one_step, params, grads)
    ((before, after),) = seen
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for path, x, y in zip(
        mt.tree.paths(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    ):
        assert (x, x.weak_type) == (y, False), path


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_jit_with_donated_arguments_traces_once(name):
    tx, replicas, traces = ZOO[name](), levels(name, SOLO, SOLO), []

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(0)
        return mt.step(tx, grads, params, state, replicas=replicas)

    grads = arrays(STEPS, seed=1)
    params, state = arrays(), tx.init(arrays())
    for i in range(STEPS):
        before = jax.tree.leaves((params, state))
        params, state = step(params, state, jax.tree.map(lambda x, i=i: x[i], grads))
        assert all(x.is_deleted() for x in before)
    assert len(traces) == 1
    assert_close((params, state), looped(tx, replicas, tensors(), tensors(STEPS, seed=1)))


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_many_problems_are_those_of_torch(name):
    """`jit` of `vmap` of `grad` through three steps, by the parameters and by the gradients."""
    tx, replicas, problems, steps = ZOO[name](), levels(name, SOLO, SOLO), 2, 3

    def loss(params, grads):
        params, _ = looped(tx, replicas, params, grads, steps)
        return sum((x * x * x).sum() for x in mt.tree.leaves(params))

    actual = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(arrays(problems), arrays(problems, steps))
    expected = torch.func.vmap(torch.func.grad(loss, (0, 1)))(
        tensors(problems), tensors(problems, steps)
    )
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("name", [n for n in NAMES if communicates(n)])
def test_replicas_of_a_mesh_are_those_of_torch(name):
    """`shard_map(check_vma=True)` on a mesh of 2 x 2 devices and `torch.func.vmap`."""
    tx, k = ZOO[name](), worlds.WORLD
    mesh, simulated = mt.NamedAxis(("node", "worker")), mt.Vmapped(k)

    def on_jax(params, grads):
        params, state = scanned(tx, levels(name, mt.NamedAxis("worker"), mesh), params, grads)
        return params, mt.tree.leaves(state)

    def on_torch(params, grads):
        replicas = levels(name, simulated.groups(2), simulated)
        params, state = looped(tx, replicas, params, grads)
        return params, mt.tree.leaves(state)

    actual = jax.jit(worlds.sharded(on_jax))(arrays(k), arrays(k, STEPS, seed=1))
    assert_close(actual, torch.func.vmap(on_torch)(tensors(k), tensors(k, STEPS, seed=1)))
