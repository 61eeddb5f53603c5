"""`meantime bench step`: one AdamW step (`update` and `apply_updates`) on trees of leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

import meantime as mt
from meantime.cli.bench.timing import interleave, report, use_threads, write_json
from meantime.cli.bench.trees import SHAPES, parse, tree

LEARNING_RATE = 1e-3
REFERENCE = "torch foreach"
# Parameters, two moments: read and written; gradients: read. In float32.
BYTES_PER_ELEMENT = 7 * 4


def step(
    shapes: Annotated[
        list[str], typer.Option("--leaves", help="Trees to step, as COUNTxSIZE.")
    ] = SHAPES,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="CPUs to use.")] = 1,
    peers: Annotated[bool, typer.Option(help="Add optax under jit (extra `jax`).")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the timings here.")] = None,
) -> None:
    """Step AdamW: ours against torch.optim and, with --peers, optax."""
    use_threads(threads)
    results = {}
    for shape in shapes:
        count, size = parse(shape)
        contenders = _torch_contenders(count, size)
        if peers:
            contenders.update(_jax_contenders(count, size))
        title = f"AdamW, {count} leaves of {size:,} (float32, {threads} thread)"
        results[title] = interleave(contenders, REFERENCE, rounds)
        report(title, results[title], count * size * BYTES_PER_ELEMENT)
    if out is not None:
        write_json(out, results)


def _torch_contenders(count: int, size: int) -> dict[str, Callable[[], object]]:
    grads = tree(count, size, seed=1)

    def ours(step: Callable[..., tuple[object, object]]) -> Callable[[], object]:
        params: object = tree(count, size, seed=0)
        state = mt.adamw(LEARNING_RATE).init(params)

        def run() -> None:
            nonlocal params, state
            params, state = step(params, state)

        return run

    tx = mt.adamw(LEARNING_RATE)

    def formulas(params: object, state: object) -> tuple[object, object]:
        updates, state = tx.update(grads, state, params)
        return mt.apply_updates(params, updates), state

    def torch_adamw(kernel: str) -> Callable[[], object]:
        parameters = [torch.nn.Parameter(x) for x in tree(count, size, seed=0).values()]
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            parameter.grad = grad.clone()
        optimizer = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, foreach=kernel == "foreach", fused=kernel == "fused"
        )
        return optimizer.step

    return {
        REFERENCE: torch_adamw("foreach"),
        "torch fused": torch_adamw("fused"),
        "meantime update, apply_updates": ours(formulas),
        "meantime step": ours(lambda params, state: mt.step(tx, grads, params, state)),
        "meantime step donated": ours(
            lambda params, state: mt.step(tx, grads, params, state, donate=True)
        ),
    }


def _jax_contenders(count: int, size: int) -> dict[str, Callable[[], object]]:
    try:
        import jax
        import jax.numpy as jnp
        import optax
    except ImportError:
        raise typer.BadParameter("--peers needs jax and optax: install meantime[jax]") from None

    grads = {name: jnp.asarray(x.numpy()) for name, x in tree(count, size, seed=1).items()}

    def stepper(tx: object, apply_updates: Callable[..., object]) -> Callable[[], object]:
        params = {name: jnp.asarray(x.numpy()) for name, x in tree(count, size, seed=0).items()}
        state = tx.init(params)  # type: ignore[attr-defined]

        @jax.jit
        def jitted(params, state):  # type: ignore[no-untyped-def]
            updates, state = tx.update(grads, state, params)  # type: ignore[attr-defined]
            return apply_updates(params, updates), state

        def run() -> None:
            nonlocal params, state
            params, state = jax.block_until_ready(jitted(params, state))

        return run

    return {
        "optax jit": stepper(optax.adamw(LEARNING_RATE, weight_decay=0.01), optax.apply_updates),
        "meantime jit": stepper(mt.adamw(LEARNING_RATE), mt.apply_updates),
    }
