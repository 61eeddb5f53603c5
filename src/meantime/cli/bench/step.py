"""`meantime bench step`: one optimizer step (`update` and `apply_updates`) on trees of leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import meantime as mt
from meantime.cli.bench.memory import extra_memory
from meantime.cli.bench.peers import Contenders, optax_steps, torchopt_steps
from meantime.cli.bench.timing import interleave, report, use_threads, write_json
from meantime.cli.bench.trees import SHAPES, parse, tree

LEARNING_RATE = 1e-3
REFERENCE = "torch fused"
STEPPED = ["4x64", "150x64", *SHAPES]
FLAT = ["1x12800000"]
RULES: dict[str, tuple[Callable[[], mt.Transform], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (
        lambda: mt.adamw(LEARNING_RATE),
        lambda parameters, **kernel: torch.optim.AdamW(parameters, lr=LEARNING_RATE, **kernel),
    ),
    "sgd": (
        lambda: mt.sgd(LEARNING_RATE, momentum=0.9),
        lambda parameters, **kernel: torch.optim.SGD(
            parameters, lr=LEARNING_RATE, momentum=0.9, **kernel
        ),
    ),
}
# torch has no Lion: SGD with momentum stands in for it, which moves the same bytes.
RULES["lion"] = (lambda: mt.compile(mt.lion(LEARNING_RATE)), RULES["sgd"][1])
# Parameters and slots are read and written, gradients read: float32 values for each parameter.
STREAMS = {"adamw": 7, "sgd": 5, "lion": 5}


def step(
    shapes: Annotated[
        list[str] | None, typer.Option("--leaves", help="Trees to step, as COUNTxSIZE.")
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="adamw, sgd (with momentum), or lion (compiled, against torch's SGD of the same "
            "bytes)."
        ),
    ] = "adamw",
    rounds: Annotated[int, typer.Option(min=2, help="Counted rounds.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="CPUs to use.")] = 1,
    peers: Annotated[bool, typer.Option(help="Add optax and TorchOpt (extra `bench`).")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the timings here.")] = None,
) -> None:
    """Step an optimizer: ours against torch.optim and, with --peers, optax and TorchOpt."""
    if rule not in RULES:
        raise typer.BadParameter(f"--rule must be one of {', '.join(RULES)}, got {rule!r}")
    use_threads(threads)
    results = {}
    for shape in shapes or (FLAT if rule == "lion" else STEPPED):
        count, size = parse(shape)
        moved = count * size * STREAMS[rule] * 4
        contenders = {**_contenders(rule, count, size), "limit: add_ of the same bytes": add(moved)}
        if peers:
            contenders.update(optax_steps(rule, LEARNING_RATE, count, size))
            if rule != "lion":
                contenders.update(torchopt_steps(rule, LEARNING_RATE, count, size))
        title = f"{rule}, {count} leaves of {size:,} (float32, {threads} thread)"
        # A round of few small leaves would be shorter than what the clock can tell.
        repeat = max(1, 100_000 // (count * (size + 1_000)))
        results[title] = interleave(contenders, REFERENCE, rounds, repeat=repeat)
        if count * size >= 10**6:
            results[title] = {
                name: replace(timing, extra_memory=extra_memory(run) / (count * size * 4))
                for (name, timing), run in zip(
                    results[title].items(), contenders.values(), strict=True
                )
            }
        report(title, results[title], moved)
    if out is not None:
        write_json(out, results)


def add(moved: int) -> Callable[[], object]:
    """What any step takes that moves so many bytes: two vectors are read, one is written."""
    x, y = torch.zeros(moved // 12), torch.ones(moved // 12)
    return lambda: x.add_(y)


def _contenders(rule: str, count: int, size: int) -> Contenders:
    make, optimizer = RULES[rule]
    grads = tree(count, size, seed=1)
    tx = make()

    def ours(step: Callable[..., tuple[Any, Any]]) -> Callable[[], object]:
        params: Any = tree(count, size, seed=0)
        state = tx.init(params)

        def run() -> Any:
            nonlocal params, state
            params, state = step(params, state)
            return params

        return run

    def formulas(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return mt.apply_updates(params, updates), state

    def theirs(**kernel: bool) -> Callable[[], object]:
        parameters = [torch.nn.Parameter(x) for x in tree(count, size, seed=0).values()]
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            parameter.grad = grad.clone()
        stepper = optimizer(parameters, **kernel)

        def run() -> Any:
            stepper.step()
            return dict(zip(grads, parameters, strict=True))

        return run

    return {
        "torch foreach": theirs(foreach=True),
        REFERENCE: theirs(fused=True),
        "meantime update, apply_updates": ours(formulas),
        "meantime step": ours(lambda params, state: mt.step(tx, grads, params, state)),
        "meantime step donated": ours(
            lambda params, state: mt.step(tx, grads, params, state, donate=True)
        ),
    }
