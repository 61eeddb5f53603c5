"""Steps of other libraries, on the same trees."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import typer

import meantime as mt
from meantime.cli.bench.trees import tree

Contenders = dict[str, Callable[[], Any]]


def load(name: str) -> Any:
    """A peer's module."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise typer.BadParameter(f"--peers needs {name}: pip install 'meantime[bench]'") from None


def optax_steps(rule: str, learning_rate: float, count: int, size: int) -> Contenders:
    """optax under `jax.jit`, with memory of its own and donated; ours under `jax.jit`."""
    jax, optax = load("jax"), load("optax")
    grads = {name: jax.numpy.asarray(x.numpy()) for name, x in tree(count, size, seed=1).items()}
    theirs, ours = {
        "adamw": (optax.adamw(learning_rate, weight_decay=0.01), mt.adamw(learning_rate)),
        "sgd": (
            optax.sgd(learning_rate, momentum=0.9),
            mt.sgd(learning_rate, momentum=0.9),
        ),
        "lion": (optax.lion(learning_rate, weight_decay=0.0), mt.lion(learning_rate)),
    }[rule]

    def stepper(tx: Any, apply: Callable[..., Any], donate: bool = False) -> Callable[[], Any]:
        params: Any = {k: jax.numpy.asarray(x.numpy()) for k, x in tree(count, size, 0).items()}
        state = tx.init(params)

        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return apply(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())

        def run() -> Any:
            nonlocal params, state
            params, state = jax.block_until_ready(jitted(params, state, grads))
            return params

        return run

    return {
        "optax jit": stepper(theirs, optax.apply_updates),
        "meantime jit": stepper(ours, mt.apply_updates),
        "optax jit donated": stepper(theirs, optax.apply_updates, donate=True),
        "meantime jit donated": stepper(ours, mt.apply_updates, donate=True),
    }


def torchopt_steps(rule: str, learning_rate: float, count: int, size: int) -> Contenders:
    """TorchOpt's functional optimizer, out of place and in place, and its class."""
    torchopt = load("torchopt")
    grads = tree(count, size, seed=1)
    if rule == "adamw":
        tx = torchopt.adamw(learning_rate, weight_decay=0.01)
        make = torchopt.AdamW
        options: dict[str, Any] = {"weight_decay": 0.01}
    else:
        tx, make = torchopt.sgd(learning_rate, momentum=0.9), torchopt.SGD
        options = {"momentum": 0.9}

    def functional(inplace: bool) -> Callable[[], Any]:
        params: Any = tree(count, size, seed=0)
        state = tx.init(params)

        @torch.no_grad()
        def run() -> Any:
            nonlocal params, state
            updates, state = tx.update(
                {name: x.clone() for name, x in grads.items()} if inplace else grads,
                *(state,),
                params=params,
                inplace=inplace,
            )
            params = torchopt.apply_updates(params, updates, inplace=inplace)
            return params

        return run

    parameters = [torch.nn.Parameter(x) for x in tree(count, size, seed=0).values()]
    for parameter, grad in zip(parameters, grads.values(), strict=True):
        parameter.grad = grad.clone()
    optimizer = make(parameters, lr=learning_rate, **options)

    def classic() -> Any:
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)  # it is overwritten
        optimizer.step()
        return dict(zip(grads, parameters, strict=True))

    return {
        "TorchOpt functional": functional(inplace=False),
        "TorchOpt functional in place": functional(inplace=True),
        "TorchOpt class": classic,
    }


def diloco_rounds(period: int, replicas: int = 4, batch: int = 32) -> Contenders:
    """A round of DiLoCo in JAX for replicas under `vmap`: by hand with optax, and ours."""
    jax, optax = load("jax"), load("optax")
    jnp = jax.numpy
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(replicas, batch, 64)), jnp.float32)
    y = jnp.asarray(rng.integers(10, size=(replicas, batch)))
    start = {
        "first": jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32),
        "second": jnp.asarray(rng.normal(size=(64, 10)) / 8, jnp.float32),
    }
    inner, outer = optax.adamw(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits = jax.nn.relu(x @ params["first"]) @ params["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def by_hand(anchor: Any, state: Any, x: Any, y: Any) -> Any:
        inner_state, outer_state = state

        def local_step(carry: Any, _: Any) -> Any:
            params, inner_state = carry
            updates, inner_state = inner.update(jax.grad(loss)(params, x, y), inner_state, params)
            return (optax.apply_updates(params, updates), inner_state), None

        (params, inner_state), _ = jax.lax.scan(local_step, (anchor, inner_state), length=period)
        delta = jax.tree.map(lambda a, p: a - jax.lax.pmean(p, "replica"), anchor, params)
        updates, outer_state = outer.update(delta, outer_state, anchor)
        return optax.apply_updates(anchor, updates), (inner_state, outer_state)

    tx, world = mt.diloco(inner, every=period), mt.NamedAxis("replica")

    def ours(params: Any, state: Any, x: Any, y: Any) -> Any:
        def local_step(carry: Any, _: Any) -> Any:
            params, state = carry
            return mt.step(tx, jax.grad(loss)(params, x, y), params, state, replicas=world), None

        return jax.lax.scan(local_step, (params, state), length=period)[0]

    local, averager = mt.chain(inner), mt.outer(mt.chain(mt.mean(), outer))

    def by_rounds(params: Any, state: Any, x: Any, y: Any) -> Any:
        def local_step(carry: Any, _: Any) -> Any:
            params, state = carry
            return mt.step(local, jax.grad(loss)(params, x, y), params, state), None

        inner_state, outer_state = state
        carry = params, inner_state
        (params, inner_state), _ = jax.lax.scan(local_step, carry, length=period)
        params, outer_state = averager.average(params, outer_state, replicas=world)
        return params, (inner_state, outer_state)

    def repeated(function: Any, init: Any) -> Callable[[], Any]:
        one_round = jax.jit(jax.vmap(function, axis_name="replica"))
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (replicas, *p.shape)), start)
        state = jax.vmap(init)(params)

        def run() -> Any:
            nonlocal params, state
            params, state = jax.block_until_ready(one_round(params, state, x, y))
            return params

        return run

    return {
        "DiLoCo by hand, optax": repeated(by_hand, lambda p: (inner.init(p), outer.init(p))),
        "meantime outer, a scan a round": repeated(
            by_rounds, lambda p: (local.init(p), averager.init(p))
        ),
        "meantime diloco, a condition a step": repeated(ours, tx.init),
    }
