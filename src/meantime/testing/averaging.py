"""The laws of averagers, one function each.

They are tried on replicas simulated by `torch.func.vmap`: from common parameters the replicas
drift apart and are then synchronised with `now=True`, for some rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from meantime import tree
from meantime.replicas.base import Levels
from meantime.replicas.vmapped import Vmapped
from meantime.testing.cases import call, describe, law, local_step, vmapped
from meantime.testing.compare import Difference, close, same_bits
from meantime.transform import Transform
from meantime.tree import Tree


class Drift(NamedTuple):
    """Common parameters, what each replica adds to its own before each synchronisation (leaves
    with a leading axis of replicas), another order of the replicas, the sizes of the levels of
    a hierarchy, and other keyword arguments."""

    params: Tree
    moves: tuple[Tree, ...]
    order: tuple[int, ...]
    levels: Mapping[str, int] | None = None
    extra: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return describe(self)

    @property
    def size(self) -> int:
        return len(self.order)

    @property
    def replicas(self) -> Levels:
        world = Vmapped(self.size)
        if self.levels is None:
            return world
        return {name: world.groups(size) for name, size in self.levels.items()}


class Round(NamedTuple):
    """All replicas' parameters before and after a synchronisation, and the state after it."""

    before: Tree
    after: Tree
    state: Any


def rounds(tx: Transform, drift: Drift) -> list[Round]:
    """Drift and synchronise, for all rounds."""
    extra = {**drift.extra, "replicas": drift.replicas, "now": True}

    def synchronise(params: Tree, state: Any) -> Any:
        return call(tx.average, extra, params, state)

    def start(params: Tree) -> Any:
        return params, tx.init(params)

    params, state = vmapped(start, _everywhere(drift.params, drift.size))
    found = []
    for move in drift.moves:
        before = tree.map(lambda p, m: (p + m).to(p.dtype), params, move)
        params, state = vmapped(synchronise, before, state)
        found.append(Round(before, params, state))
    return found


def _everywhere(values: Tree, size: int) -> Tree:
    """The same values on all replicas."""
    return tree.map(lambda x: x.detach().expand(size, *x.shape).clone(), values)


def _all_equal(params: Tree, claim: str) -> None:
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        for rank in range(1, len(leaf)):
            same_bits(f"params{path}", leaf[rank], leaf[0], f"{claim}; replica {rank} and 0")


def _reordered(values: Tree, order: Sequence[int]) -> Tree:
    return tree.map(lambda x: x[list(order)], values)


def _scale(found: Round, drift: Drift) -> Tree:
    """The largest number of each leaf that a mean of this round has to do with."""

    def largest(*leaves: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.double().abs().reshape(-1) for x in leaves])

    return tree.map(largest, found.before, drift.params, *drift.moves)


@law
def agreement(tx: Transform, drift: Drift) -> None:
    """After a synchronisation all replicas hold the same bits."""
    for i, round in enumerate(rounds(tx, drift), start=1):
        _all_equal(round.after, f"replicas differ after synchronisation {i}")


@law
def equal_replicas(tx: Transform, drift: Drift) -> None:
    """Replicas that are equal and get the same gradients stay equal, bit for bit."""
    extra = {**drift.extra, "replicas": drift.replicas}
    params = _everywhere(drift.params, drift.size)
    state = vmapped(tx.init, params)

    def one(grads: Tree, params: Tree, state: Any) -> Any:
        return local_step(tx, grads, params, state, extra)

    for i in range(6):
        move = drift.moves[i % len(drift.moves)]
        grads = _everywhere(tree.map(lambda x: x[0], move), drift.size)
        params, state = vmapped(one, grads, params, state)
        _all_equal(params, f"equal replicas became unequal at step {i + 1}")


@law
def permutation(tx: Transform, drift: Drift) -> None:
    """Replicas in another order give the same parameters, and the states in that order.

    Tried on one synchronisation of multiples of 1/8, whose sums are exact in every order: an
    optimizer like Adam would make a rounding of zero a full step.
    """

    def exact(x: torch.Tensor) -> torch.Tensor:
        return (x.double() * 8).round() / 8

    move = tree.map(exact, drift.moves[0])
    drift = drift._replace(params=tree.map(exact, drift.params), moves=(move,))
    (usual,) = rounds(tx, drift)
    (other,) = rounds(tx, drift._replace(moves=(_reordered(move, drift.order),)))
    claim = f"with the replicas in the order {drift.order} the result differs"
    close("params", other.after, _reordered(usual.after, drift.order), claim)
    close("state", other.state, _reordered(usual.state, drift.order), claim)


@law
def poison(tx: Transform, drift: Drift) -> None:
    """A replica whose parameters are not finite does not make those of others so."""
    if drift.size == 1:
        return
    rank = drift.order[0]

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[rank] = float("nan")
        return x

    moves = (tree.map(poisoned, drift.moves[0]), *drift.moves[1:])
    for round in rounds(tx, drift._replace(moves=moves)):
        for path, leaf in zip(tree.paths(round.after), tree.leaves(round.after), strict=True):
            if not leaf.isfinite().all():
                raise Difference(f"params{path}", f"replica {rank} was not finite: now {leaf}")


@law
def mean_preserved(tx: Transform, drift: Drift) -> None:
    """What a synchronisation leaves is the mean of what was there."""
    for round in rounds(tx, drift):
        wanted = tree.map(lambda x: _mean(x), round.before)
        claim = "the replicas do not hold the mean of what they held"
        close("params", round.after, wanted, claim, scale=_scale(round, drift))


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.double().mean(0, keepdim=True).expand(x.shape).to(x.dtype)


@law
def idempotent(tx: Transform, drift: Drift) -> None:
    """A second synchronisation right after the first changes nothing but a rounding."""
    still = tree.map(torch.zeros_like, drift.moves[0])
    moves = [move for moving in drift.moves for move in (moving, still)]
    found = rounds(tx, drift._replace(moves=tuple(moves)))
    for round in found[1::2]:
        claim = "synchronising twice differs from once"
        close("params", round.after, round.before, claim, scale=_scale(round, drift))


@law
def affine(tx: Transform, drift: Drift) -> None:
    """Scaling and shifting all replicas alike scales and shifts the result."""
    drift = drift._replace(params=_wide(drift.params), moves=_wide(drift.moves))
    other = drift._replace(
        params=tree.map(lambda x: 8 - 2 * x, drift.params),
        moves=tree.map(lambda x: -2 * x, drift.moves),
    )
    for usual, image in zip(rounds(tx, drift), rounds(tx, other), strict=True):
        wanted = tree.map(lambda x: 8 - 2 * x, usual.after)
        scale = tree.map(lambda x: x + 8, _scale(image, other))
        close("params", image.after, wanted, "8 - 2 x gives something else", scale=scale)


def _wide(values: Tree) -> Tree:
    return tree.map(lambda x: x.double(), values)
