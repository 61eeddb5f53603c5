"""The laws about what can be done to a transform: compile, vectorise, differentiate, `jit`.

Each takes a while, so the battery tries them on one case instead of many.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy
import torch

from meantime import tree
from meantime.testing.cases import Case, law, local_step, on_leaves, require, vmapped
from meantime.testing.compare import close, larger, same_bits
from meantime.transform import Transform
from meantime.tree import Tree


@law
def compiles(tx: Transform, case: Case) -> None:
    """A whole step compiles without a graph break, gives the same bits, and compiles once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")

    def one(grads: Tree, params: Tree, state: Any) -> Any:
        return local_step(tx, grads, params, state, case.extra)

    torch._dynamo.reset()
    try:
        compiled = torch.compile(one, fullgraph=True, backend=counter)
        params, state = case.params, tx.init(case.params)
        for i, grads in enumerate(case.grads, start=1):
            wanted = one(grads, params, state)
            found = compiled(grads, params, state)
            same_bits("", found, wanted, f"the compiled step {i} differs")
            require(
                counter.frame_count <= 1,
                f"step {i} was compiled anew: no Python value may change from step to step",
            )
            params, state = wanted
    finally:
        torch._dynamo.reset()


@law
def vectorises(tx: Transform, case: Case) -> None:
    """`torch.func.vmap` over independent problems is a loop over them."""
    factors = (1.0, -0.5, 2.0)

    def problems(values: Tree) -> list[Tree]:
        return [tree.map(lambda x, f=f: (x * f).to(x.dtype), values) for f in factors]

    def stack(values: list[Tree]) -> Tree:
        return tree.map(lambda *xs: torch.stack(xs), *values)

    def one(grads: Tree, params: Tree, state: Any) -> Any:
        return local_step(tx, grads, params, state, case.extra)

    params = problems(case.params)
    looped = [(p, tx.init(p)) for p in params]
    batched = stack(params), stack([tx.init(p) for p in params])
    for grads in case.grads:
        looped = [one(g, *pair) for g, pair in zip(problems(grads), looped, strict=True)]
        batched = vmapped(one, stack(problems(grads)), *batched)
        claim = "vmap over problems differs from a loop over them"
        for name, found, wanted in (
            ("params", batched[0], stack([p for p, _ in looped])),
            ("state", batched[1], stack([s for _, s in looped])),
        ):
            close(name, found, wanted, claim, scale=larger(wanted, (case.params, case.grads)))


@law
def differentiates(tx: Transform, case: Case) -> None:
    """The derivative of two steps, by parameters and gradients, is that of finite differences."""
    start = _cast((case.params, case.grads[0]), torch.float64)
    direction = _cast((case.grads[1], case.grads[2]), torch.float64)

    def trained(params: Tree, grads: Tree) -> torch.Tensor:
        state = tx.init(params)
        for _ in range(2):
            params, state = local_step(tx, grads, params, state, case.extra)
        return sum(x.sin().sum() for x in tree.leaves(params))

    function, leaves, _ = on_leaves(trained, *start)
    gradient = torch.func.grad(lambda leaves: function(leaves)[0])(leaves)
    for path, value in zip(tree.paths(start), gradient, strict=True):
        require(bool(value.isfinite().all()), f"the derivative by (params, grads){path} is {value}")
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, tree.leaves(direction), strict=True))
    h = 1e-5
    ahead = trained(*tree.map(lambda x, d: x + h * d, start, direction))
    behind = trained(*tree.map(lambda x, d: x - h * d, start, direction))
    expected = float(ahead - behind) / (2 * h)
    require(
        abs(slope - expected) <= 1e-5 * max(1.0, abs(expected)),
        f"the derivative of two steps along a direction is {slope}, finite differences give "
        f"{expected}: something cuts or breaks the gradient",
    )


@law
def runs_on_jax(tx: Transform, case: Case) -> None:
    """Under `jax.jit`, on JAX arrays, the numbers are those on torch tensors.

    Holds without being tried where JAX is not installed.
    """
    if importlib.util.find_spec("jax") is None:
        return
    import jax

    def to_jax(values: Tree) -> Tree:
        return tree.map(lambda x: jax.numpy.asarray(x.numpy()), values)

    def to_torch(values: Tree) -> Tree:
        return tree.map(lambda x: torch.from_numpy(numpy.array(x)), values)

    def one(grads: Tree, params: Tree, state: Any) -> Any:
        return local_step(tx, grads, params, state, case.extra)

    params, steps = _cast((case.params, case.grads), torch.float32)
    on_torch = params, tx.init(params)
    on_jax = to_jax(params), tx.init(to_jax(params))
    function, _, rebuild = on_leaves(one, to_jax(steps[0]), *on_jax)
    jitted = jax.jit(function)
    for grads in steps:
        on_torch = one(grads, *on_torch)
        on_jax = rebuild(jitted(tree.leaves((to_jax(grads), *on_jax))))
        scale = larger(on_torch, (params, steps))
        close("", to_torch(on_jax), on_torch, "JAX and torch differ", scale=scale, roundings=64)


def _cast(values: Tree, dtype: torch.dtype) -> Tree:
    return tree.map(lambda x: x.detach().to(dtype) if x.is_floating_point() else x, values)
