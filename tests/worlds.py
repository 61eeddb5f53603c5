"""One training loop, run in every world, and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import meantime as mt
from meantime import arrays
from tests.references import RECIPES
from tests.references.problem import WORLD, data, gradients, loss, start


def one_step(recipe, tx, grad, replicas, params, state, x, y):
    """A replica that is not busy in this step, where the recipe has such, makes no update."""
    extra = {"replicas": replicas, **recipe.extra(params, x, y)}
    grads = grad(params, x, y)
    if recipe.busy is None:
        return mt.step(tx, grads, params, state, **extra)
    updates, after = tx.update(grads, state, params, **mt.pick(tx.update, extra))
    made = (mt.apply_updates(params, updates), after)
    busy = recipe.busy(y)

    def chosen(a, b):  # what `update` left alone keeps its type in JAX
        return b if a is b else arrays.where(busy, a, b)

    params, state = mt.tree.map(chosen, made, (params, state))
    return tx.average(params, state, **mt.pick(tx.average, extra))


def train(recipe, grad, replicas, params, xs, ys):
    """What the recipe shows of one replica after each step."""
    tx = recipe.transform()
    state = tx.init(params)
    trajectory = []
    for x, y in zip(xs, ys, strict=True):
        params, state = one_step(recipe, tx, grad, replicas, params, state, x, y)
        shown = recipe.shown(state, params)
        trajectory.append((shown["w"], shown["b"]))
    return trajectory


def flat(trajectory) -> np.ndarray:
    """Weights and bias in one row: (step, replica, parameter) of stacked torch results."""
    return np.stack([np.concatenate([w, b[:, None]], 1) for w, b in trajectory])


def hierarchy(world):
    return {"node": world.groups(2), "world": world}


def run_vmapped(name: str) -> np.ndarray:
    recipe = RECIPES[name]
    params = {key: torch.tensor(value) for key, value in start().items()}
    x, y = (torch.tensor(a) for a in data())

    def body(xs, ys):
        world = mt.Vmapped(WORLD)
        replicas = hierarchy(world) if recipe.levels else world
        return train(recipe, torch.func.grad(loss), replicas, params, xs, ys)

    return flat(torch.func.vmap(body)(x, y))


def run_processes() -> dict[str, np.ndarray]:
    """All recipes; runs in each process of a job, and returns its trajectories."""
    world = mt.Distributed(bucket_bytes=24)  # three float64: a message does not hold the tree
    levels = hierarchy(world)
    params = {key: torch.tensor(value) for key, value in start().items()}
    x, y = (torch.tensor(a)[world.rank] for a in data())
    results = {}
    for name, recipe in RECIPES.items():
        # One Distributed for all recipes is on purpose: they average trees of the same kind or
        # say that they do not.
        replicas = levels if recipe.levels else world
        trajectory = train(recipe, torch.func.grad(loss), replicas, params, x, y)
        results[name] = flat([(w[None], b[None]) for w, b in trajectory])[:, 0]
    return results


def jax_loop(recipe, replicas) -> Callable[..., Any]:
    """`(params, xs, ys) -> trajectory` of one replica, as a `lax.scan`."""
    import jax

    tx = recipe.transform()

    def loop(params, xs, ys):
        def body(carry, batch):
            params, state = one_step(recipe, tx, jax.grad(loss), replicas, *carry, *batch)
            shown = recipe.shown(state, params)
            return (params, state), (shown["w"], shown["b"])

        return jax.lax.scan(body, (params, tx.init(params)), (xs, ys))[1]

    return loop


def run_jax_vmap(name: str) -> np.ndarray:
    import jax

    recipe, world = RECIPES[name], mt.NamedAxis("replica")
    replicas = hierarchy(world) if recipe.levels else world
    loop = jax_loop(recipe, replicas)
    params = jax.tree.map(jax.numpy.asarray, start())
    w, b = jax.jit(jax.vmap(partial(loop, params), axis_name="replica"))(*data())
    return np.concatenate([w, b[..., None]], 2).swapaxes(0, 1)


def mesh():
    """Two nodes of two workers."""
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()[:WORLD]).reshape(2, 2), ("node", "worker"))


def sharded(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one replica over `mesh()`: arguments and results have an axis of replicas."""
    import jax

    def on_device(*arguments):
        results = loop(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    spec = jax.sharding.PartitionSpec(("node", "worker"))
    return jax.shard_map(on_device, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=True)


def run_shard_map(name: str) -> np.ndarray:
    import jax
    import jax.numpy as jnp

    recipe, world = RECIPES[name], mt.NamedAxis(("node", "worker"))
    levels = {"node": mt.NamedAxis("worker"), "world": world}
    loop = jax_loop(recipe, levels if recipe.levels else world)
    params = jax.tree.map(lambda x: jnp.stack([x] * WORLD), start())
    w, b = jax.jit(sharded(loop))(params, *data())
    return np.concatenate([w, b[..., None]], 2).swapaxes(0, 1)


def run_numpy(name: str) -> np.ndarray:
    """(step, replica, parameter)."""
    theta = np.tile(np.concatenate([start()["w"], [start()["b"]]]), (WORLD, 1))
    return np.stack(list(RECIPES[name].reference(theta, gradients)))
