"""One training loop, run in every world, and the same algorithms as plain NumPy loops.

The problem: linear regression on four replicas with data of their own, whose best parameters
differ from replica to replica, so that it shows whenever somebody averages too early or too late.

`RECIPES` pairs each transform with a reference that shares no code with the library: it holds
the parameters of all replicas as the rows of one array and follows the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import meantime as mt

WORLD = 4
STEPS = 12
FEATURES = 3

# --- the problem -----------------------------------------------------------------------------


class Data(NamedTuple):
    """Axes (replica, step, sample, ...)."""

    x: Any
    y: Any


def data() -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(WORLD, STEPS, 5, FEATURES))
    truth = rng.normal(size=(WORLD, FEATURES)) * 2
    y = np.einsum("ktsf,kf->kts", x, truth) + 0.1 * rng.normal(size=(WORLD, STEPS, 5))
    return Data(x, y)


def start() -> dict[str, np.ndarray]:
    return {"w": np.array([0.5, -1.0, 2.0]), "b": np.array(0.25)}


def loss(params, x, y):
    """Operators only: torch, JAX and NumPy."""
    residual = x @ params["w"] + params["b"] - y
    return (residual * residual).mean() / 2


# --- the loop through the library ------------------------------------------------------------


def one_step(recipe, tx, grad, replicas, params, state, x, y):
    """The weight of a replica, where the recipe has weights, changes from step to step."""
    extra = {"weight": abs(y[0])} if recipe.weighted else {}
    return mt.step(tx, grad(params, x, y), params, state, replicas=replicas, **extra)


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


# --- NumPy references ------------------------------------------------------------------------


def run_numpy(name: str) -> np.ndarray:
    """(step, replica, parameter)."""
    theta = np.tile(np.concatenate([start()["w"], [start()["b"]]]), (WORLD, 1))
    return np.stack(list(RECIPES[name].reference(theta, gradients)))


def gradients(theta: np.ndarray, t: int) -> np.ndarray:
    """Row k: the gradient of replica k at its parameters, on its batch of step t (from 1)."""
    x, y = (a[:, t - 1] for a in data())
    residual = np.einsum("ksf,kf->ks", x, theta[:, :-1]) + theta[:, -1:] - y
    weights = np.einsum("ks,ksf->kf", residual, x) / x.shape[1]
    return np.concatenate([weights, residual.mean(1, keepdims=True)], 1)


def everyone(theta: np.ndarray) -> np.ndarray:
    return np.broadcast_to(theta.mean(0), theta.shape).copy()


def in_nodes(theta: np.ndarray) -> np.ndarray:
    return np.concatenate([everyone(theta[:2]), everyone(theta[2:])])


class NumpySGD:
    def __init__(self, rate: float | Callable[[int], float], momentum: float = 0.0):
        self.rate, self.momentum, self.buffer, self.steps = rate, momentum, None, 0

    def __call__(self, theta, g):
        rate = self.rate(self.steps) if callable(self.rate) else self.rate
        self.steps += 1
        self.buffer = g if self.buffer is None else self.momentum * self.buffer + g
        return theta - rate * self.buffer


class NumpyAdamW:
    def __init__(self, rate: float, decay: float = 0.0, b1: float = 0.9, b2: float = 0.999):
        self.rate, self.decay, self.b1, self.b2 = rate, decay, b1, b2
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, theta, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return theta - self.rate * (m / (np.sqrt(v) + 1e-8) + self.decay * theta)


class NumpyClippedNesterov:
    """By value, by norm, with decayed weights."""

    def __init__(self):
        self.buffer, self.steps = 0.0, 0

    def __call__(self, theta, g):
        g = np.clip(g, -0.8, 0.8)
        norm = np.linalg.norm(g, axis=1, keepdims=True)
        g = g * np.minimum(1, 1.0 / norm) + 0.1 * theta
        self.buffer = g if self.steps == 0 else 0.6 * self.buffer + g
        rate, self.steps = falling(self.steps), self.steps + 1
        return theta - rate * (g + 0.6 * self.buffer)


def ref_local(theta, grad, inner, every, warmup=0, last=None):
    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, everyone(g) if t <= warmup else g)
        due = t > warmup and (t - warmup) % every == 0
        if last is not None:
            due = (due and t <= last) or t == last
        if due:
            theta = everyone(theta)
        yield theta


def ref_weighted(theta, grad, inner, warmup, due):
    """Means by the weights of `one_step`; of gradients first, of parameters after these steps."""

    def mean(rows, t):
        weight = np.abs(data().y[:, t - 1, :1])
        return np.broadcast_to((weight * rows).sum(0) / weight.sum(), rows.shape)

    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, mean(g, t) if t <= warmup else g)
        theta = mean(theta, t) if t in due else theta
        yield theta


def ref_levels_of_gradients(theta, grad, inner, warmup, every):
    for t in range(1, STEPS + 1):
        g = grad(theta, t)
        theta = inner(theta, everyone(g) if t <= warmup else in_nodes(g))
        theta = everyone(theta) if t % every == 0 else theta
        yield theta


def ref_hierarchical(theta, grad, inner, node, world):
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % world == 0:
            theta = everyone(theta)
        elif t % node == 0:
            theta = in_nodes(theta)
        yield theta


def ref_slowmo(theta, grad, inner, rate, every, beta, alpha):
    anchor, u = theta[0], np.zeros_like(theta[0])
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            eta = rate(t - 1) if callable(rate) else rate
            u = beta * u + (anchor - theta.mean(0)) / eta
            anchor = anchor - alpha * eta * u
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def ref_diloco(theta, grad, inner, every, gamma, mu, first=None):
    """`first` has the step of the first synchronisation of each parameter, `every` by default."""
    anchor, b = theta[0], np.zeros_like(theta[0])
    first = np.full(anchor.shape, every) if first is None else np.array(first)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        due = (t >= first) & ((t - first) % every == 0)
        delta = anchor - theta.mean(0)
        b = np.where(due, mu * b + delta, b)
        anchor = np.where(due, anchor - gamma * (delta + mu * b), anchor)
        theta = np.where(due, anchor, theta)
        yield theta


def ref_outer(theta, grad, inner, outer, due):
    """An optimizer on the mean pseudo-gradient."""
    anchor = theta[0]
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t in due:
            anchor = outer(anchor, anchor - theta.mean(0))
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def ref_compressed(theta, grad, inner, every):
    """The two largest of the four differences of each replica; the others go with the next."""
    anchor, lost = theta[0], np.zeros_like(theta)
    for t in range(1, STEPS + 1):
        theta = inner(theta, grad(theta, t))
        if t % every == 0:
            total = lost + (anchor - theta)
            smallest = np.argsort(np.abs(total), axis=1)[:, :2]
            sent = total.astype(np.float32)
            np.put_along_axis(sent, smallest, 0, axis=1)
            lost = total - sent
            anchor = anchor - sent.mean(0, dtype=np.float64)
            theta = np.tile(anchor, (WORLD, 1))
        yield theta


def ref_ema(trajectory, decay):
    average = None
    for theta in trajectory:
        average = theta if average is None else decay * average + (1 - decay) * theta
        yield average


def ref_mean_of_rounds(trajectory, every, last):
    """The mean of the last so many of what stands after each round; before that, as it is."""
    snapshots: list[np.ndarray] = []
    for t, theta in enumerate(trajectory, start=1):
        snapshots += [theta] if t % every == 0 else []
        yield np.mean(snapshots[-last:], axis=0) if snapshots else theta


class Recipe(NamedTuple):
    transform: Callable[[], Any]
    reference: Callable[..., Any]
    levels: bool = False
    weighted: bool = False
    tolerance: float = 1e-11
    jax_tolerance: float = 1e-11
    # What is recorded, of the state and the parameters.
    shown: Callable[[Any, Any], Any] = lambda state, params: params


def falling(step: int) -> float:
    """A learning rate, for the references."""
    return 0.1 + 0.5 * (0.2 - 0.1) * (1 + math.cos(math.pi * min(step / 10, 1)))


_falling = mt.schedules.cosine(0.2, steps=10, end=0.1)
_half = mt.codecs.topk(0.5)

RECIPES: dict[str, Recipe] = {
    "local_sgd": Recipe(
        lambda: mt.local_sgd(mt.sgd(0.1), every=3),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.1), every=3),
    ),
    "local_sgd, last": Recipe(
        lambda: mt.local_sgd(mt.compile(mt.sgd(0.1)), every=4, last=10),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.1), every=4, last=10),
    ),
    "post_local_sgd, momentum": Recipe(
        lambda: mt.post_local_sgd(mt.sgd(0.05, momentum=0.9), every=4, warmup=3),
        lambda theta, grad: ref_local(theta, grad, NumpySGD(0.05, 0.9), every=4, warmup=3),
    ),
    "post_local_sgd, adamw": Recipe(
        lambda: mt.post_local_sgd(mt.adamw(0.05, weight_decay=0.1), every=3, warmup=2),
        lambda theta, grad: ref_local(theta, grad, NumpyAdamW(0.05, 0.1), every=3, warmup=2),
    ),
    "hierarchical_sgd": Recipe(
        lambda: mt.hierarchical_sgd(mt.sgd(0.1, momentum=0.5), {"node": 2, "world": 6}),
        lambda theta, grad: ref_hierarchical(theta, grad, NumpySGD(0.1, 0.5), node=2, world=6),
        levels=True,
    ),
    "slowmo": Recipe(
        lambda: mt.slowmo(mt.sgd(0.1), 0.1, every=3, momentum=0.6, slow_learning_rate=0.9),
        lambda theta, grad: ref_slowmo(theta, grad, NumpySGD(0.1), 0.1, 3, beta=0.6, alpha=0.9),
    ),
    "slowmo, schedule": Recipe(
        lambda: mt.slowmo(mt.sgd(_falling, momentum=0.5), _falling, every=4),
        lambda theta, grad: ref_slowmo(
            theta, grad, NumpySGD(falling, 0.5), falling, 4, beta=0.5, alpha=1.0
        ),
        jax_tolerance=1e-6,  # where a schedule of an int32 counter is float32
    ),
    "diloco": Recipe(
        lambda: mt.diloco(mt.adamw(0.05, b2=0.95, weight_decay=0.1), every=4),
        lambda theta, grad: ref_diloco(
            theta, grad, NumpyAdamW(0.05, 0.1, b2=0.95), 4, gamma=0.7, mu=0.9
        ),
    ),
    "ema of each replica": Recipe(
        lambda: mt.chain(mt.sgd(0.1), mt.periodic(mt.average_params(), every=3), mt.ema(0.8)),
        lambda theta, grad: ref_ema(ref_local(theta, grad, NumpySGD(0.1), every=3), 0.8),
        shown=mt.averaged_params,
    ),
    "swa of the anchor": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.periodic(
                mt.outer(mt.chain(mt.mean(), mt.sgd(0.7, 0.9, nesterov=True), mt.swa())), every=3
            ),
        ),
        lambda theta, grad: ref_mean_of_rounds(
            ref_diloco(theta, grad, NumpySGD(0.1), 3, gamma=0.7, mu=0.9), every=3, last=STEPS
        ),
        shown=mt.averaged_params,
    ),
    "lawa of the means": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1), mt.periodic(mt.chain(mt.average_params(), mt.lawa(2)), every=2)
        ),
        lambda theta, grad: ref_mean_of_rounds(
            ref_local(theta, grad, NumpySGD(0.1), every=2), every=2, last=2
        ),
        shown=mt.averaged_params,
    ),
    "streaming_diloco": Recipe(
        lambda: mt.streaming_diloco(mt.sgd(0.1), every=4, fragments=2),
        lambda theta, grad: ref_diloco(
            theta, grad, NumpySGD(0.1), 4, gamma=0.7, mu=0.9, first=[4, 4, 4, 2]
        ),
    ),
    "outer adam": Recipe(
        lambda: mt.chain(
            mt.adam(0.05),
            mt.periodic(mt.outer(mt.chain(mt.mean(), mt.adam(0.1))), every=3, after=1, first=2),
        ),
        lambda theta, grad: ref_outer(
            theta, grad, NumpyAdamW(0.05), NumpyAdamW(0.1), due=(2, 5, 8, 11)
        ),
    ),
    "gradient transforms": Recipe(
        lambda: mt.local_sgd(
            mt.named_chain(
                value=mt.clip(0.8),
                norm=mt.clip_by_global_norm(1.0),
                decay=mt.add_decayed_weights(0.1),
                momentum=mt.trace(0.6, nesterov=True),
                rate=mt.scale_by_schedule(_falling),
                down=mt.scale(-1.0),
                nothing=mt.identity(),
            ),
            every=3,
        ),
        lambda theta, grad: ref_local(theta, grad, NumpyClippedNesterov(), every=3),
        jax_tolerance=1e-6,
    ),
    "weighted": Recipe(
        lambda: mt.chain(
            mt.warmup_mean(2),
            mt.sgd(0.1),
            mt.periodic(mt.average_params(), every=mt.schedules.piecewise(2, {4: 1.5}), after=2),
        ),
        lambda theta, grad: ref_weighted(theta, grad, NumpySGD(0.1), warmup=2, due=(4, 7, 10)),
        weighted=True,
    ),
    "gradients over levels": Recipe(
        lambda: mt.chain(
            mt.warmup_mean(3, over="world", then="node"),
            mt.sgd(0.1),
            mt.periodic(mt.average_params("world"), every=5),
        ),
        lambda theta, grad: ref_levels_of_gradients(theta, grad, NumpySGD(0.1), 3, every=5),
        levels=True,
    ),
    "compressed": Recipe(
        lambda: mt.chain(
            mt.sgd(0.1),
            mt.periodic(
                mt.outer(mt.chain(mt.error_feedback(_half), mt.mean(codec=_half), mt.sgd(1.0))),
                every=2,
            ),
        ),
        lambda theta, grad: ref_compressed(theta, grad, NumpySGD(0.1), every=2),
        tolerance=3e-6,  # messages are float32
        jax_tolerance=3e-6,
    ),
}
