"""The local step of a transform as one compiled kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meantime import tree
from meantime._foreach import plain, transforming
from meantime.control import is_concrete
from meantime.keywords import forwards
from meantime.made import made
from meantime.transform import Transform, apply_updates, as_transform
from meantime.tree import Tree


@made
def compile(tx: Any) -> Transform:
    r"""Compile what a transform does in a local step.

    .. math:: (\theta, s) \leftarrow (\theta + u, s'), \quad (u, s') = \mathrm{update}(g, s, \theta)

    becomes one graph of `torch.compile` on torch tensors and one computation of `jax.jit` on JAX
    arrays, made at the first step: an elementwise rule then reads and writes memory once. Where
    torch has a fused kernel for the rule (`sgd`, `adam`, `adamw`), `step` goes on using that.

    `step(..., donate=True)` has the graph write into the parameters and the state. It is what large
    trees want: new memory for every result takes longer than the step. The compiled graph has
    a part for each leaf; many small leaves are compiled for long, one flat tensor in seconds.

    `average` stays as it is: it communicates only now and then. Compile the inner optimizer of a
    recipe rather than the recipe: `diloco(compile(tx), every=50)`. What communicates in `update`
    (`mean`, `warmup_mean`) can be in a graph with `Solo` and `Vmapped`, not with processes.

    Args:
        tx: a transform.

    Returns:
        A transform with the same state, and the same numbers within rounding.

    Raises:
        TypeError: `tx` is no transform.

    Example:
        >>> import torch, meantime as mt
        >>> tx = mt.compile(mt.chain(mt.clip(1.0), mt.trace(0.9), mt.scale(-0.5)))
        >>> params = torch.zeros(2)
        >>> state = tx.init(params)
        >>> params, state = mt.step(tx, torch.tensor([3.0, -0.5]), params, state)
        >>> params
        tensor([-0.5000,  0.2500])
    """
    tx = as_transform(tx)
    if not tx.updates:
        return tx
    kernel = getattr(tx.update, "apply", None)
    updating = _Compiled(tx.update)
    stepping, writing = _Compiled(_step(tx)), _Compiled(_write(tx), donates=True)

    @forwards(tx.update)
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        extra.pop("donate", None)
        run = updating.on((updates, state, params)) or tx.update
        return run(updates, state, params, **extra)

    def apply(
        updates: Tree, state: Any, params: Tree, *, donate: bool = False, **extra: Any
    ) -> tuple[Tree, Any] | None:
        if kernel is not None:
            done: tuple[Tree, Any] | None = kernel(updates, state, params, donate=donate, **extra)
            if done is not None:
                return done
        run = (writing if donate else stepping).on((updates, state, params))
        if run is None:
            return None
        return run(updates, state, params, **extra) or (params, state)

    result = Transform(tx.init, update, tx.average if tx.averages else None)
    result.update.apply = apply  # type: ignore[attr-defined]
    return result


def _step(tx: Transform) -> Callable[..., tuple[Tree, Any]]:
    def step(updates: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(updates, state, params, **extra)
        return apply_updates(params, updates), state

    return step


def _write(tx: Transform) -> Callable[..., tuple[Tree, Any] | None]:
    step = _step(tx)

    def write(updates: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any] | None:
        after = step(updates, state, params, **extra)
        old = tree.leaves((params, state))
        if not isinstance(old[0], torch.Tensor):
            return after  # `jax.jit` uses what it is given
        # A state may pass values from one place to another: nothing is written before all is read.
        new = [value.clone() for value in tree.leaves(after)]
        for x, value in zip(old, new, strict=True):
            x.copy_(value)
        return None

    return write


class _Compiled:
    """A function `(updates, state, params, **extra)`, compiled at its first use by the library of
    the arrays; whether it may destroy state and parameters."""

    def __init__(self, function: Callable[..., Any], donates: bool = False):
        self._function, self._donates = function, donates
        self._torch: Callable[..., Any] | None = None
        self._jax: Callable[..., Any] | None = None

    def on(self, trees: tuple[Tree, Any, Tree]) -> Callable[..., Any] | None:
        """What to call for these trees; None if there is nothing to compile, and
        inside of another transformation."""
        leaves = tree.leaves(trees)
        if not tree.leaves(trees[0]) or torch.compiler.is_compiling() or transforming():
            return None
        if all(map(plain, leaves)):
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
                return None  # differentiated through
            self._torch = self._torch or self._on_torch()
            return self._torch
        if all(type(leaf).__module__.startswith("jax") and is_concrete(leaf) for leaf in leaves):
            self._jax = self._jax or self._on_jax()
            return self._jax
        return None

    def _on_torch(self) -> Callable[..., Any]:
        compiled = torch.compile(self._function, fullgraph=True, dynamic=False)

        def run(*trees: Tree, **extra: Any) -> Any:
            # A graph is compiled for every value of a number, but not of an array.
            arrays = {k: torch.tensor(v) if type(v) is float else v for k, v in extra.items()}
            return compiled(*trees, **arrays)

        return run

    def _on_jax(self) -> Callable[..., Any]:
        import jax

        donated = (1, 2) if self._donates else ()
        compiled: Callable[..., Any] = jax.jit(
            self._function, static_argnames="replicas", donate_argnums=donated
        )
        return compiled
