"""The same trajectory in every world, and nothing is communicated when nothing is due."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import meantime as mt
from tests import worlds
from tests.hlo import Program
from tests.references.problem import Recipe

NAMES = list(worlds.RECIPES)


def check(actual: np.ndarray, name: str, tolerance: float | None = None) -> None:
    tolerance = tolerance or worlds.RECIPES[name].tolerance
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, worlds.run_numpy(name), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def processes(gloo):
    return gloo.run(worlds.run_processes)


@pytest.mark.parametrize("name", NAMES)
def test_references_differ(name):
    """The problem tells the recipes apart, else agreement would say little."""
    mine = worlds.run_numpy(name)
    others = [worlds.run_numpy(other) for other in NAMES if other != name]
    assert all(np.abs(mine - other).max() > 1e-3 for other in others)
    assert np.ptp(mine, axis=1).max() > 1e-2  # replicas go apart between synchronisations


def test_every_transform_is_in_a_recipe():
    """What is missing here wants a recipe, and a reference in NumPy, in `worlds.RECIPES`."""
    transforms = {
        name
        for name, value in vars(mt).items()
        if getattr(value, "__annotations__", {}).get("return") == "Transform"
    }
    called = set()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code.co_name))
    try:
        for recipe in worlds.RECIPES.values():
            recipe.transform()
    finally:
        sys.setprofile(None)
    assert len(transforms) > 20
    assert transforms - called == set()


@pytest.mark.parametrize("name", NAMES)
def test_vmapped(name):
    check(worlds.run_vmapped(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_processes(name, processes):
    check(np.stack([rank[name] for rank in processes], 1), name)


@pytest.mark.parametrize("name", NAMES)
def test_jax_vmap(name, x64, quick_compilation):
    check(worlds.run_jax_vmap(name), name, worlds.RECIPES[name].jax_tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_shard_map(name, x64, quick_compilation):
    check(worlds.run_shard_map(name), name, worlds.RECIPES[name].jax_tolerance)


# --- what runs when nothing is due -----------------------------------------------------------


def compiled(recipe):
    """A scan over steps: its counters are no constants that the compiler could decide upon."""
    import jax
    import jax.numpy as jnp

    loop = worlds.jax_loop(recipe, mt.NamedAxis(("node", "worker")))
    params = jax.tree.map(lambda x: jnp.stack([jnp.float32(x)] * 4), worlds.start())
    x, y = (jnp.float32(a) for a in worlds.data())
    return Program(jax.jit(worlds.sharded(loop)).lower(params, x, y).compile())


def test_counting_of_collectives():
    """An unconditional mean is seen outside of every conditional."""
    pytest.importorskip("jax")
    always = Recipe(lambda: mt.chain(mt.mean(), mt.sgd(0.1)), None)
    assert compiled(always).always() > 0


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "slowmo"])
def test_not_due_runs_no_collective(name):
    pytest.importorskip("jax")
    program = compiled(worlds.RECIPES[name])
    assert program.always() == 0
    # w, b, the weight and its mean, in one message
    assert [sorted(counts) for counts in program.branches()] == [[0, 1]]


def test_warmup_is_a_branch():
    """Averaged gradients and averaged parameters: one branch each."""
    pytest.importorskip("jax")
    program = compiled(worlds.RECIPES["post_local_sgd, momentum"])
    assert program.always() == 0
    assert [sorted(counts) for counts in program.branches()] == [[0, 1]] * 2


def test_state_is_a_scan_carry_in_shard_map():
    """Every state keeps its type, varying axes included, from one step to the next."""
    jax = pytest.importorskip("jax")
    world = mt.NamedAxis(("node", "worker"))
    levels = {"node": mt.NamedAxis("worker"), "world": world}
    seen = []
    for recipe in worlds.RECIPES.values():
        tx, replicas = recipe.transform(), levels if recipe.levels else world

        def types(params, x, y, recipe=recipe, tx=tx, replicas=replicas):
            state = tx.init(params)
            before = jax.tree.map(jax.typeof, (params, state))
            after = worlds.one_step(
                recipe, tx, jax.grad(worlds.loss), replicas, params, state, x, y
            )
            seen.append((before, jax.tree.map(jax.typeof, after)))
            return params

        params = jax.tree.map(lambda x: jax.numpy.stack([x] * 4), worlds.start())
        x, y = (a[:, 0] for a in worlds.data())
        jax.eval_shape(worlds.sharded(types), params, x, y)
    assert len(seen) == len(worlds.RECIPES)
    for before, after in seen:
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert jax.tree.leaves(before) == jax.tree.leaves(after)
