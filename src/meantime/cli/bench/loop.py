"""`meantime bench loop`: whole training steps of a small network, functional against classic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import meantime as mt
from meantime.adapters import AveragingOptimizer
from meantime.cli.bench.peers import diloco_rounds
from meantime.cli.bench.timing import Timing, interleave, report, use_threads, write_json

REFERENCE = "classic, torch AdamW"
BARE = "the optimizer"
BY_HAND = "DiLoCo by hand, optax"
BATCHES = [32, 256]
LEARNING_RATE = 1e-3


def loop(
    batches: Annotated[list[int], typer.Option("--batch", help="Examples a step.")] = BATCHES,
    rounds: Annotated[int, typer.Option(min=2, help="Counted rounds of 20 steps.")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="CPUs to use.")] = 1,
    peers: Annotated[bool, typer.Option(help="Add DiLoCo by hand with optax (`bench`).")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the timings here.")] = None,
) -> None:
    """Train an MLP (64-64-10) with AdamW, gradients and step; and step a wrapped optimizer."""
    use_threads(threads)
    results: dict[str, dict[str, Timing]] = {}
    for batch in batches:
        title = f"20 steps of an MLP, batch {batch} ({threads} thread)"
        results[title] = interleave(_contenders(batch), REFERENCE, rounds)
        report(title, results[title])
    for count in (4, 150):
        title = f"a step of torch's AdamW on {count} tensors of 256 that does not synchronise"
        contenders = _wrapped(count)
        results[title] = interleave(contenders, BARE, rounds, repeat=2000 // count)
        report(title, results[title])
    if peers:
        title = "a round of 50 steps of DiLoCo in JAX, 4 replicas under vmap"
        results[title] = interleave(diloco_rounds(50), BY_HAND, rounds)
        report(title, results[title])
    if out is not None:
        write_json(out, results)


def _contenders(batch: int) -> dict[str, Callable[[], object]]:
    x, y = torch.randn(batch, 64), torch.randint(10, (batch,))

    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        return torch.nn.Sequential(*layers)

    def classic(fused: bool) -> Callable[[], object]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

        def run() -> None:
            for _ in range(20):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

        return run

    skeleton = network()
    tx = mt.adamw(LEARNING_RATE)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(skeleton, params, (x,)), y)

    def functional(gradient: Callable[..., Any], donate: bool) -> Callable[[], object]:
        params: Any = {name: p.detach().clone() for name, p in network().named_parameters()}
        state = tx.init(params)

        def run() -> None:
            nonlocal params, state
            for _ in range(20):
                grads = gradient(params, x, y)
                params, state = mt.step(tx, grads, params, state, donate=donate)

        return run

    ours = mt.value_and_grad(loss)
    return {
        REFERENCE: classic(fused=False),
        "classic, torch fused AdamW": classic(fused=True),
        "meantime, pure": functional(lambda *a: ours(*a)[1], donate=False),
        "meantime, donated": functional(lambda *a: ours(*a)[1], donate=True),
        "torch.func.grad, pure": functional(grad(loss), donate=False),
    }


def _wrapped(count: int) -> dict[str, Callable[[], object]]:
    def optimizer() -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.randn(256)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn(256)
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)

    averager = mt.periodic(mt.average_params(), every=10**9)
    wrapped = AveragingOptimizer(optimizer(), averager, replicas=mt.Solo())
    return {BARE: optimizer().step, "AveragingOptimizer around it": wrapped.step}
