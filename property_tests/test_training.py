"""Laws of whole trainings: resuming, limits in which algorithms are the same, purity."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meantime as mt
from meantime import tree
from meantime.testing.cases import snapshot, vmapped
from meantime.testing.compare import close, same_bits
from meantime.testing.strategies import replica_counts, trees, trees_like

EXACT = (torch.float32, torch.float64)
RATE = 0.1

INNER: dict[str, Callable[[], mt.Transform]] = {
    "sgd": lambda: mt.sgd(RATE),
    "momentum": lambda: mt.sgd(RATE, momentum=0.9, weight_decay=0.01),
    "adamw": lambda: mt.adamw(RATE),
}
inners = st.sampled_from(sorted(INNER)).map(lambda name: INNER[name]())
periods = st.integers(1, 5)


class Problem:
    """Gradients that depend on the parameters and differ from replica to replica and in time."""

    def __init__(self, size: int, params: Any, pulls: list[Any]):
        self.size, self.params, self.pulls = size, params, pulls
        self.world = mt.Vmapped(size)

    def __repr__(self) -> str:
        return f"Problem({self.size}, {self.params}, {self.pulls})"

    def grads(self, params: Any, pull: Any) -> Any:
        return tree.map(lambda p, c: 0.5 * (p - c), params, pull)

    def train(
        self, tx: mt.Transform, steps: int, replicas: Any = None, stop: int | None = None
    ) -> list[Any]:
        """All replicas' parameters after every step; `stop`: through a file after that step."""
        replicas = self.world if replicas is None else replicas

        def start(params: Any) -> Any:
            return params, tx.init(params)

        def step(params: Any, state: Any, pull: Any) -> Any:
            return mt.step(tx, self.grads(params, pull), params, state, replicas=replicas)

        everywhere = tree.map(lambda x: x.expand(self.size, *x.shape).clone(), self.params)
        params, state = vmapped(start, everywhere)
        found = []
        for i in range(1, steps + 1):
            params, state = vmapped(step, params, state, self.pulls[i % len(self.pulls)])
            found.append(params)
            if i == stop:
                template = vmapped(start, everywhere)
                params, state = mt.load_state_dict(template, through_a_file((params, state)))
        return found


def through_a_file(state: Any) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(mt.state_dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@st.composite
def problems(draw: st.DrawFn, size: int | None = None, magnitude: float = 10.0) -> Problem:
    size = draw(replica_counts(4)) if size is None else size
    params = draw(trees(dtypes=EXACT, magnitude=magnitude, max_leaves=3))
    pulls = [draw(trees_like(params, leading=(size,), magnitude=magnitude)) for _ in range(3)]
    return Problem(size, params, pulls)


def same_training(problem: Problem, one: Any, other: Any, steps: int, bits: bool = False) -> None:
    found, wanted = problem.train(one, steps), problem.train(other, steps)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        claim = f"the trainings differ after step {i}"
        if bits:
            same_bits("params", a, b, claim)
        else:
            scale = tree.map(lambda x: x.double().abs() + 10.0, b)
            close("params", a, b, claim, scale=scale, roundings=64)


# --- resume -----------------------------------------------------------------------------------

RECIPES: dict[str, Callable[[mt.Transform, int], mt.Transform]] = {
    "post_local_sgd": lambda inner, every: mt.post_local_sgd(inner, every, warmup=2),
    "diloco": lambda inner, every: mt.diloco(inner, every),
    "slowmo": lambda inner, every: mt.slowmo(inner, RATE, every),
    "hierarchical_sgd": lambda inner, every: mt.hierarchical_sgd(
        inner, {"node": every, "world": 2 * every}
    ),
}


@pytest.mark.parametrize("name", RECIPES)
@given(problems(size=4), inners, periods, st.integers(1, 8))
def test_resuming_anywhere_is_never_stopping(
    name: str, problem: Problem, inner: mt.Transform, every: int, stop: int
) -> None:
    tx = RECIPES[name](inner, every)
    world = mt.Vmapped(4)
    replicas = {"node": world.groups(2), "world": world} if name.startswith("hier") else world
    straight = problem.train(tx, 9, replicas)
    resumed = problem.train(tx, 9, replicas, stop=stop)
    same_bits("params", resumed, straight, f"stopping after step {stop} changes the training")


# --- limits -----------------------------------------------------------------------------------


@given(problems(), inners, periods)
def test_outer_sgd_of_rate_1_is_plain_averaging(problem, inner, every) -> None:
    outer = mt.outer(mt.chain(mt.mean(), mt.sgd(1.0)))
    tx = mt.chain(inner, mt.periodic(outer, every))
    same_training(problem, tx, mt.local_sgd(inner, every), steps=7)


@given(problems(), inners, periods)
def test_diloco_without_momentum_is_local_sgd(problem, inner, every) -> None:
    tx = mt.diloco(inner, every, learning_rate=1.0, momentum=0.0)
    same_training(problem, tx, mt.local_sgd(inner, every), steps=7)


@given(problems(), inners, periods)
def test_slowmo_without_momentum_is_local_sgd(problem, inner, every) -> None:
    tx = mt.slowmo(inner, RATE, every, momentum=0.0, slow_learning_rate=1.0)
    same_training(problem, tx, mt.local_sgd(inner, every), steps=7)


@given(problems())
def test_sgd_averaged_every_step_is_data_parallel(problem) -> None:
    tx = mt.local_sgd(mt.sgd(RATE), every=1)
    same_training(problem, tx, mt.chain(mt.mean(), mt.sgd(RATE)), steps=7)


@given(problems(), inners, periods)
def test_warmup_that_never_ends_is_data_parallel(problem, inner, every) -> None:
    tx = mt.post_local_sgd(inner, every, warmup=100)
    same_training(problem, tx, mt.chain(mt.mean(), inner), steps=5, bits=True)


@given(problems(size=4), inners, periods)
def test_one_level_is_local_sgd(problem, inner, every) -> None:
    found = problem.train(mt.hierarchical_sgd(inner, {"all": every}), 7, {"all": mt.Vmapped(4)})
    wanted = problem.train(mt.local_sgd(inner, every), 7)
    same_bits("params", found, wanted, "one level of a hierarchy differs from local SGD")


@given(problems(size=4), inners, periods, st.integers(1, 3))
def test_levels_of_the_same_replicas_are_local_sgd(problem, inner, every, factor) -> None:
    world = mt.Vmapped(4)
    tx = mt.hierarchical_sgd(inner, {"node": every, "world": every * factor})
    found = problem.train(tx, 7, {"node": world, "world": world})
    wanted = problem.train(mt.local_sgd(inner, every), 7)
    same_bits("params", found, wanted, "which level averages over all does not matter")


@pytest.mark.parametrize("recipe", ["local_sgd", "post_local_sgd", "hierarchical_sgd"])
@given(problems(size=1), inners, st.data())
def test_one_replica_is_the_inner_optimizer(recipe: str, problem, inner, data) -> None:
    every = data.draw(periods)
    replicas: Any = mt.Solo()
    if recipe == "local_sgd":
        tx = mt.local_sgd(inner, every)
    elif recipe == "post_local_sgd":
        tx = mt.post_local_sgd(inner, every, warmup=data.draw(st.integers(0, 4)))
    else:
        tx, replicas = mt.hierarchical_sgd(inner, {"a": every}), {"a": mt.Solo()}
    params, state = problem.params, tx.init(problem.params)
    bare_params, bare_state = problem.params, inner.init(problem.params)
    for i in range(7):
        pull = tree.map(lambda x: x[0], problem.pulls[i % 3])
        grads = problem.grads(params, pull)
        params, state = mt.step(tx, grads, params, state, replicas=replicas)
        bare_params, bare_state = mt.step(inner, grads, bare_params, bare_state)
        same_bits("params", params, bare_params, "averaging alone changes something")


@given(
    problems(size=1),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
)
def test_sgd_is_torch_sgd(problem, rate, momentum, dampening, nesterov, decay) -> None:
    nesterov = nesterov and momentum > 0 and dampening == 0
    tx = mt.sgd(rate, momentum, nesterov, dampening, decay)
    params, state = problem.params, tx.init(problem.params)
    theirs = [x.detach().clone() for x in tree.leaves(params)]
    optimizer = torch.optim.SGD(theirs, rate, momentum, dampening, decay, nesterov)
    for i in range(5):
        pull = tree.map(lambda x: x[0], problem.pulls[i % 3])
        grads = problem.grads(params, pull)
        for x, grad in zip(theirs, tree.leaves(grads), strict=True):
            x.grad = grad.clone()
        optimizer.step()
        params, state = mt.step(tx, grads, params, state)
        claim = f"differs from torch.optim.SGD after step {i + 1}"
        close("params", tree.leaves(params), theirs, claim, scale=[x + 10.0 for x in theirs])


# --- trees ------------------------------------------------------------------------------------


@given(problems(size=1), inners, periods)
def test_a_tree_trains_as_its_leaves_do(problem, inner, every) -> None:
    tx = mt.diloco(inner, every)

    def train(params: Any, pulls: list[Any]) -> Any:
        state = tx.init(params)
        for i in range(6):
            grads = problem.grads(params, pulls[i % 3])
            params, state = mt.step(tx, grads, params, state, replicas=mt.Solo())
        return params

    pulls = [tree.map(lambda x: x[0], pull) for pull in problem.pulls]
    whole = tree.leaves(train(problem.params, pulls))
    columns = zip(*(tree.leaves(pull) for pull in pulls), strict=True)
    parts = [
        train(leaf, list(column))
        for leaf, column in zip(tree.leaves(problem.params), columns, strict=True)
    ]
    # Kernels for leaves of one dtype and the formulas for mixed ones round differently.
    scale = [x.double().abs() + 10.0 for x in parts]
    close("leaves", whole, parts, "a leaf trains otherwise in company", scale=scale)


@given(problems(), inners, periods, st.sampled_from(["diloco", "slowmo", "post_local_sgd"]))
def test_arguments_are_never_written_to(problem, inner, every, name) -> None:
    given = (problem.params, problem.pulls)
    before = snapshot(given)
    trained = problem.train(RECIPES[name](inner, every), 3)
    kept = snapshot(trained)
    problem.train(RECIPES[name](inner, every), 6)
    same_bits("given", given, before, "training wrote to what it was given")
    same_bits("trained", trained, kept, "training wrote to an earlier result")


# --- many replicas against NumPy --------------------------------------------------------------


@given(problems(), periods, st.integers(0, 4), st.sampled_from([0.5, 0.7, 1.0]), st.booleans())
def test_diloco_is_a_numpy_loop(problem, every, steps, rate, nesterov) -> None:
    """Local SGD steps and a Nesterov or plain outer step, one leaf at a time, in float64."""
    momentum = 0.9 if nesterov else 0.0
    steps = steps + every
    tx = mt.diloco(mt.sgd(RATE), every, learning_rate=rate, momentum=momentum)
    found = problem.train(tx, steps)[-1]

    def reference(start: torch.Tensor, *pulls: torch.Tensor) -> torch.Tensor:
        anchor = start.double().numpy()
        replicas = np.stack([anchor] * problem.size)
        buffer = np.zeros_like(anchor)
        for step in range(1, steps + 1):
            replicas = replicas - RATE * 0.5 * (replicas - pulls[step % 3].double().numpy())
            if step % every == 0:
                delta = anchor - replicas.mean(0)
                buffer = momentum * buffer + delta
                anchor = anchor - rate * (delta + momentum * buffer)
                replicas = np.stack([anchor] * problem.size)
        return torch.from_numpy(np.asarray(replicas)).to(start.dtype)

    wanted = tree.map(reference, problem.params, *problem.pulls)
    scale = tree.map(lambda x: x.double().abs() + 10.0, wanted)
    close("params", found, wanted, "differs from the loop", scale=scale, roundings=64)
