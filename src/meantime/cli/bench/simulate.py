"""`meantime bench simulate`: many replicas of a small network in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.func import grad, vmap

import meantime as mt
from meantime.cli.bench.timing import Timing, interleave, report, use_threads, write_json

REFERENCE = "Python loop over replicas"
REPLICAS = [8, 64]
PERIOD = 4


def simulate(
    replicas: Annotated[list[int], typer.Option(help="Numbers of replicas.")] = REPLICAS,
    rounds: Annotated[int, typer.Option(min=2, help="Counted rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="CPUs to use.")] = 1,
    peers: Annotated[bool, typer.Option(help="Add JAX under jit (extra `jax`).")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the timings here.")] = None,
) -> None:
    """One step of local SGD on every replica: gradients, AdamW and averaging."""
    use_threads(threads)
    results: dict[str, dict[str, Timing]] = {}
    for size in replicas:
        title = f"{size} replicas of an MLP, batch 32 each ({threads} thread)"
        contenders = _torch_contenders(size)
        if peers:
            contenders["JAX, jit of vmap"] = _jax_contender(size)
        results[title] = interleave(contenders, REFERENCE, rounds)
        report(title, results[title])
    if out is not None:
        write_json(out, results)


def _start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 8

    return {"w1": normal(64, 64), "b1": normal(64), "w2": normal(64, 10), "b2": normal(10)}


def _loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    hidden = mt.arrays.maximum(x @ params["w1"] + params["b1"], 0.0)
    return ((hidden @ params["w2"] + params["b2"] - y) ** 2).mean()


def _data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 32, 64, generator=generator)
    return x, torch.randn(size, 32, 10, generator=generator)


def _torch_contenders(size: int) -> dict[str, Callable[[], object]]:
    x, y = _data(size)
    tx = mt.local_sgd(mt.adamw(1e-3), every=PERIOD)
    world = mt.Vmapped(size)

    def one(params: Any, state: Any, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return mt.step(tx, grad(_loss)(params, x, y), params, state, replicas=world)

    def simulated(step: Callable[..., tuple[Any, Any]]) -> Callable[[], object]:
        params: Any = {name: p.expand(size, *p.shape).clone() for name, p in _start().items()}
        state = vmap(tx.init)(params)

        def run() -> None:
            nonlocal params, state
            params, state = step(params, state, x, y)

        return run

    inner = mt.adamw(1e-3)
    gradient = mt.value_and_grad(_loss)
    looped = [_start() for _ in range(size)]
    states = [inner.init(params) for params in looped]
    steps = 0

    def python_loop() -> None:
        nonlocal looped, steps
        for i, params in enumerate(looped):
            grads = gradient(params, x[i], y[i])[1]
            looped[i], states[i] = mt.step(inner, grads, params, states[i], donate=True)
        steps += 1
        if steps % PERIOD == 0:
            mean = {
                name: torch.stack([params[name] for params in looped]).mean(0) for name in looped[0]
            }
            looped = [{name: p.clone() for name, p in mean.items()} for _ in looped]

    return {
        REFERENCE: python_loop,
        "meantime, vmap": simulated(vmap(one)),
        "meantime, compiled vmap": simulated(torch.compile(vmap(one), fullgraph=True)),
    }


def _jax_contender(size: int) -> Callable[[], object]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        raise typer.BadParameter("--peers needs jax: install meantime[jax]") from None

    x, y = (jnp.asarray(data.numpy()) for data in _data(size))
    tx = mt.local_sgd(mt.adamw(1e-3), every=PERIOD)
    world = mt.NamedAxis("replica")

    def one(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        return mt.step(tx, jax.grad(_loss)(params, x, y), params, state, replicas=world)

    step = jax.jit(jax.vmap(one, axis_name="replica"))
    params: Any = {
        name: jnp.broadcast_to(jnp.asarray(p.numpy()), (size, *p.shape))
        for name, p in _start().items()
    }
    state = jax.vmap(tx.init)(params)

    def run() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(step(params, state, x, y))

    return run
