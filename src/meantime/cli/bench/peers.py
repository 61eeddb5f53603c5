"""Steps of other libraries, on the same trees."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

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
    if rule == "adamw":
        theirs = optax.adamw(learning_rate, weight_decay=0.01)
        ours = mt.adamw(learning_rate)
    else:
        theirs = optax.sgd(learning_rate, momentum=0.9)
        ours = mt.sgd(learning_rate, momentum=0.9)

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
