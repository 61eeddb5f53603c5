"""The laws every transform obeys, one function each.

A law takes a transform and a `Case` and returns nothing, or raises `LawViolation`. All of
these are quick: the battery tries them on many drawn cases.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meantime import tree
from meantime.keywords import pick
from meantime.state import load_state_dict, state_dict
from meantime.testing.cases import Case, call, law, local_step, recorded, require, snapshot
from meantime.testing.compare import close, larger, same_bits, same_form
from meantime.transform import Transform, apply_updates, step
from meantime.tree import Tree


@law
def pure(tx: Transform, case: Case) -> None:
    """No function writes to what it is given; the same arguments give the same results."""

    def twice(name: str, function: Callable[..., Any], extra: Any, **given: Tree) -> Any:
        before = snapshot(given)
        first = snapshot(call(function, extra, *given.values()))
        for argument, value in given.items():
            same_bits(argument, value, before[argument], f"`{name}` wrote to it")
        second = call(function, extra, *given.values())
        same_bits(name, second, first, f"a second `{name}` of the same gives something else")
        return second

    params = case.params
    state = twice("init", tx.init, {}, params=params)
    for grads in case.grads:
        updates, state = twice(
            "update", tx.update, case.extra, updates=grads, state=state, params=params
        )
        params = apply_updates(params, updates)
        params, state = twice("average", tx.average, case.extra, params=params, state=state)


@law
def stable_state(tx: Transform, case: Case) -> None:
    """The state consists of tensors; structure, shapes and dtypes never change."""
    params = case.params
    state = first = tx.init(params)
    for path, leaf in zip(tree.paths(first), tree.leaves(first), strict=True):
        require(isinstance(leaf, torch.Tensor), f"state{path} is {leaf!r}, not a tensor")
    for grads in case.grads:
        updates, state = call(tx.update, case.extra, grads, state, params)
        same_form("state", state, first)
        params, state = call(tx.average, case.extra, apply_updates(params, updates), state)
        same_form("state", state, first)


@law
def stable_updates(tx: Transform, case: Case) -> None:
    """Updates have the form of the gradients, averaged parameters that of the parameters."""
    params, state = case.params, tx.init(case.params)
    for grads in case.grads:
        updates, state = call(tx.update, case.extra, grads, state, params)
        same_form("updates", updates, grads)
        params, state = call(tx.average, case.extra, apply_updates(params, updates), state)
        same_form("params", params, case.params)


@law
def any_layout(tx: Transform, case: Case) -> None:
    """How tensors lie in memory does not matter."""
    packed = case._replace(
        params=tree.map(_packed, case.params), grads=tree.map(_packed, case.grads)
    )
    params, state = case.params, tx.init(case.params)
    packed_params, packed_state = packed.params, tx.init(packed.params)
    for grads, packed_grads in zip(case.grads, packed.grads, strict=True):
        params, state = local_step(tx, grads, params, state, case.extra)
        packed_params, packed_state = local_step(
            tx, packed_grads, packed_params, packed_state, case.extra
        )
        claim = "non-contiguous tensors give other numbers than contiguous ones"
        for name, found, wanted in (
            ("params", params, packed_params),
            ("state", state, packed_state),
        ):
            close(name, found, wanted, claim, scale=larger(wanted, (packed.params, packed.grads)))


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


@law
def own_memory(tx: Transform, case: Case) -> None:
    """The state never shares memory with the parameters, which an adapter writes in place."""

    def separate(after: str, params: Tree, state: Any) -> None:
        named = zip(tree.paths(params), tree.leaves(params), strict=True)
        taken = {_address(leaf): path for path, leaf in named}
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            shared = _address(leaf) != 0 and _address(leaf) in taken  # 0: nothing allocated
            where = taken.get(_address(leaf))
            require(not shared, f"after `{after}` state{path} is in the memory of params{where}")

    params, state = case.params, tx.init(case.params)
    separate("init", params, state)
    for grads in case.grads:
        updates, state = call(tx.update, case.extra, grads, state, params)
        separate("update", params, state)
        params, state = call(tx.average, case.extra, apply_updates(params, updates), state)
        separate("average", params, state)


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@law
def donation(tx: Transform, case: Case) -> None:
    """`donate=True` may destroy what is given, and gives the same results."""
    params, state = case.params, tx.init(case.params)
    for grads in case.grads:
        for name, function in (("update", tx.update), ("average", tx.average)):
            given = (grads, state, params) if name == "update" else (params, state)
            donated = call(function, {**case.extra, "donate": True}, *snapshot(given))
            kept = call(function, case.extra, *given)
            same_bits(name, donated, kept, "with donate=True the result differs")
            result, state = kept
            params = apply_updates(params, result) if name == "update" else result


@law
def one_step(tx: Transform, case: Case) -> None:
    """`meantime.step`, which may run as one kernel, is `update`, `apply_updates`, `average`.

    In half precision a kernel rounds less often, and only writing is looked at.
    """
    extra = {**pick(tx.update, dict(case.extra)), **pick(tx.average, dict(case.extra))}
    params, state = case.params, tx.init(case.params)
    reference = params, state
    exact = {x.dtype for x in tree.leaves(params)} <= {torch.float32, torch.float64}
    for grads in case.grads:
        given = {"grads": grads, "params": params, "state": state}
        before = snapshot(given)
        found = step(tx, *given.values(), **extra)
        for name, value in given.items():
            same_bits(name, value, before[name], "`step` wrote to it")
        kept = step(tx, *before.values(), **extra)
        donated = step(tx, *before.values(), **extra, donate=True)
        same_bits("(params, state)", donated, kept, "with donate=True the result differs")
        same_bits("grads", before["grads"], grads, "`step` wrote to it with donate=True")
        reference = local_step(tx, grads, *reference, case.extra)
        if exact:
            claim = "`step` differs from update, apply_updates and average"
            scale = tree.map(_largest, reference[0], params, *case.grads)
            close("params", found[0], reference[0], claim, scale=scale, roundings=64)
        params, state = found


def _largest(*leaves: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.double().reshape(-1) for x in leaves])


@law
def keywords(tx: Transform, case: Case) -> None:
    """The contract's keyword arguments are accepted, and a misspelt one is refused."""
    state, grads = tx.init(case.params), case.grads[0]
    calls: Mapping[str, Callable[..., Any]] = {
        "update": lambda **extra: tx.update(grads, state, case.params, **extra),
        "average": lambda **extra: tx.average(case.params, state, **extra),
        "step": lambda **extra: step(tx, grads, case.params, state, **extra),
    }
    for name, function in calls.items():
        extra = dict(case.extra) if name == "step" else pick(getattr(tx, name), dict(case.extra))
        function(**{**extra, "now": False, "donate": False})
        refused = False
        try:
            function(**extra, wieght=1.0)
        except TypeError:
            refused = True
        require(refused, f"`{name}` accepts the misspelt argument wieght=1.0 and drops it")


@law
def checkpoint(tx: Transform, case: Case) -> None:
    """Saved after any step and loaded into a new state, training goes on as if never stopped."""
    params, state = case.params, tx.init(case.params)
    for grads in case.grads[: case.at]:
        params, state = local_step(tx, grads, params, state, case.extra)
    file = io.BytesIO()
    torch.save(state_dict(state), file)
    file.seek(0)
    restored = load_state_dict(tx.init(case.params), torch.load(file, weights_only=True))
    same_bits("state", restored, state, "it is restored as something else")
    resumed = params
    for grads in case.grads[case.at :]:
        params, state = local_step(tx, grads, params, state, case.extra)
        resumed, restored = local_step(tx, grads, resumed, restored, case.extra)
        same_bits("params", resumed, params, "training resumed from a checkpoint differs")
        same_bits("state", restored, state, "training resumed from a checkpoint differs")


@law
def counted_in_average(tx: Transform, case: Case) -> None:
    """When replicas communicate does not depend on whether one of them skipped an update."""

    def collectives(skipped: int) -> list[tuple[Any, Any]]:
        params, state = case.params, tx.init(case.params)
        found = []
        for i, grads in enumerate(case.grads, start=1):
            extra, in_update = recorded(case.extra)
            if i != skipped:
                updates, state = call(tx.update, extra, grads, state, params)
                params = apply_updates(params, updates)
            extra, in_average = recorded(case.extra)
            params, state = call(tx.average, extra, params, state)
            found.append((in_update(), in_average()))
        return found

    rows = zip(collectives(skipped=0), collectives(skipped=case.at), strict=True)
    for i, (usual, other) in enumerate(rows, start=1):
        same = usual[1] == other[1] if i == case.at else usual == other
        require(
            same,
            f"without the update of step {case.at}, step {i} communicates {other} instead of "
            f"{usual} (in update, in average): the schedule must be counted in `average`",
        )


@law
def never_silent(tx: Transform, case: Case) -> None:
    """What communicates raises a `TypeError` when it is not told who the replicas are."""

    def loudly(name: str, function: Callable[..., Any], *given: Any) -> Any:
        extra, collectives = recorded(case.extra)
        results = call(function, extra, *given)
        if collectives():
            refused = False
            try:
                call(function, {**extra, "replicas": None}, *given)
            except TypeError:
                refused = True
            require(refused, f"`{name}` has to communicate and says nothing without `replicas`")
        return results

    params, state = case.params, tx.init(case.params)
    for grads in case.grads:
        updates, state = loudly("update", tx.update, grads, state, params)
        params, state = loudly("average", tx.average, apply_updates(params, updates), state)
