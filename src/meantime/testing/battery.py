"""All laws at once, on drawn cases, with the smallest counterexample as the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from meantime.replicas.base import Levels
from meantime.replicas.solo import Solo
from meantime.testing import averaging, laws, transformations
from meantime.testing.averaging import Drift
from meantime.testing.cases import Case, Law, LawViolation, example_case
from meantime.testing.strategies import replica_counts, trees, trees_like
from meantime.tree import Tree

DRAWN = (
    laws.stable_updates,
    laws.stable_state,
    laws.keywords,
    laws.pure,
    laws.own_memory,
    laws.any_layout,
    laws.checkpoint,
    laws.donation,
    laws.one_step,
    laws.counted_in_average,
    laws.never_silent,
)
ONCE = (
    transformations.vectorises,
    transformations.differentiates,
    transformations.compiles,
    transformations.runs_on_jax,
)
OF_AVERAGERS = (
    averaging.agreement,
    averaging.equal_replicas,
    averaging.permutation,
    averaging.poison,
)
OF_PLAIN_AVERAGERS = (
    averaging.mean_preserved,
    averaging.idempotent,
    averaging.affine,
)


def check_transform(
    tx: Any,
    *,
    params: Tree = None,
    replicas: Levels | None = None,
    extra: Mapping[str, Any] | None = None,
    examples: int = 20,
    skip: Collection[str] = (),
) -> None:
    """Try every law of transforms on a transform.

    Args:
        tx: a transform, or anything with `.init` and `.update`.
        params: try it on these parameters only. By default it is tried on trees of all kinds
            (nested, with `None`, 0-d, empty and non-contiguous leaves, mixed dtypes).
        replicas: what it is called with, `Solo()` by default. A transform that averages over
            named levels wants a mapping: `{"node": Solo(), "world": Solo()}`.
        extra: other keyword arguments of every call.
        examples: how many cases each law is tried on; laws that compile are tried on one.
        skip: names of laws to leave out, `("differentiates",)` say.

    Raises:
        LawViolation: a law is broken; it says which, at which leaf, and a minimal example.
        ValueError: `skip` names no law.

    Example:
        >>> import meantime as mt
        >>> from meantime.testing import check_transform
        >>> check_transform(mt.adam(1e-3), examples=5)

        A transform that writes to what it is given:

        >>> def update(updates, state, params=None):
        ...     return mt.tree.map(lambda u: u.neg_(), updates), state
        >>> bad = mt.Transform(lambda params: mt.EmptyState(), update)
        >>> check_transform(bad)
        Traceback (most recent call last):
            ...
        meantime.testing.cases.LawViolation: law 'pure' is broken at updates...
    """
    extra = {"replicas": replicas or Solo(), **(extra or {})}
    drawn, once = _without(skip, DRAWN, ONCE)
    _search(drawn, tx, cases(params, extra), examples)
    for law in (*drawn, *once):
        law(tx, example_case(params, extra))


def check_averager(
    tx: Any,
    *,
    plain: bool = False,
    params: Tree = None,
    levels: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
    examples: int = 20,
    skip: Collection[str] = (),
) -> None:
    """Try the laws of averagers on a transform that makes all replicas equal.

    It is tried on simulated replicas that drift apart and are synchronised with `now=True`.

    Args:
        tx: a transform whose `average` with `now=True` leaves all replicas equal.
        plain: whether what it leaves is the mean of the replicas; then more laws hold.
        params: try it on these parameters only; see `check_transform`.
        levels: for a transform that averages over named levels, the size of the groups of
            each: `{"node": 2, "world": 4}`. The largest is the number of replicas, which is
            drawn otherwise.
        extra: other keyword arguments of every call.
        examples: how many cases each law is tried on.
        skip: names of laws to leave out.

    Raises:
        LawViolation: a law is broken.
        ValueError: `skip` names no law.

    Example:
        >>> import meantime as mt
        >>> from meantime.testing import check_averager
        >>> check_averager(mt.local_sgd(mt.sgd(0.1), every=8), plain=True, examples=5)
        >>> check_averager(mt.diloco(mt.sgd(0.1), every=8), examples=5)
        >>> check_averager(mt.identity(), skip=["poison"])
        Traceback (most recent call last):
            ...
        meantime.testing.cases.LawViolation: law 'agreement' is broken at params...
    """
    usual, of_means = _without(skip, OF_AVERAGERS, OF_PLAIN_AVERAGERS)
    laws = [*usual, *of_means] if plain else usual
    _search(laws, tx, drifts(params, levels, extra or {}), examples)


@st.composite
def cases(draw: st.DrawFn, params: Tree, extra: Mapping[str, Any]) -> Case:
    """Cases with these parameters, or with drawn ones, of one to six steps."""
    at = draw(st.integers(1, 4))
    steps = at + draw(st.integers(0, 2))
    params = draw(trees()) if params is None else params
    grads = tuple(draw(trees_like(params)) for _ in range(steps))
    return Case(params, grads, at, extra)


@st.composite
def drifts(
    draw: st.DrawFn, params: Tree, levels: Mapping[str, int] | None, extra: Mapping[str, Any]
) -> Drift:
    """Rounds in which replicas drift apart, from these parameters or from drawn ones."""
    size = draw(replica_counts()) if levels is None else max(levels.values())
    order = draw(st.permutations(range(size)))
    count = draw(st.integers(1, 3))
    params = draw(trees()) if params is None else params
    moves = tuple(draw(trees_like(params, leading=(size,))) for _ in range(count))
    return Drift(params, moves, tuple(order), levels, extra)


def _without(skip: Collection[str], *groups: Collection[Law[Any]]) -> list[list[Law[Any]]]:
    names = [law.__name__ for laws in groups for law in laws]
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise ValueError(f"skip names no law: {unknown}; the laws are {names}")
    return [[law for law in laws if law.__name__ not in skip] for laws in groups]


def _search(
    laws: Collection[Law[Any]], tx: Any, subjects: st.SearchStrategy[Any], examples: int
) -> None:
    """Look for a counterexample to any of the laws, and make it small."""
    broken: list[Law[Any]] = []

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(subjects)
    def tried(subject: Any) -> None:
        # Once a law is found broken the others are left alone: the example shrinks for that one.
        for law in list(broken or laws):
            try:
                law(tx, subject)
            except LawViolation:
                broken[:] = [law]
                raise

    try:
        tried()
    except LawViolation as found:
        # Anew, without the notes of hypothesis: the example says it all.
        raise LawViolation(found.law, found.path, found.reason, found.example) from found.__cause__
    except Flaky as error:
        reason = "it broke once and not again: the transform keeps something outside of its state"
        raise LawViolation(broken[0].__name__, "", reason, "  (none)") from error
