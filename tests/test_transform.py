"""The contract: chains, extra arguments, levels, states and their dicts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

import meantime as mt

PARAMS = {"b": torch.tensor(1.0), "w": torch.tensor([1.0, -2.0])}
GRADS = {"b": torch.tensor(0.5), "w": torch.tensor([3.0, 4.0])}


def noting(name: str, seen: list, *, update: bool = True, average: bool = True) -> mt.Transform:
    """A transform that names an extra argument and notes its values."""

    def noted(values: Any, state: Any, params: Any = None, *, value: Any = None) -> Any:
        seen.append((name, "update", value))
        return values, state

    def weighted(params: Any, state: Any, *, weight: Any = None) -> Any:
        seen.append((name, "average", weight))
        return params, state

    return mt.Transform(
        lambda params: mt.EmptyState(), noted if update else None, weighted if average else None
    )


# --- chains ----------------------------------------------------------------------------------


def test_chain_is_composition():
    first, second = mt.clip_by_global_norm(1.0), mt.sgd(0.5, momentum=0.9)
    both = mt.chain(first, second)
    state, states = both.init(PARAMS), [first.init(PARAMS), second.init(PARAMS)]
    for _ in range(3):
        updates, state = both.update(GRADS, state, PARAMS)
        middle, states[0] = first.update(GRADS, states[0], PARAMS)
        expected, states[1] = second.update(middle, states[1], PARAMS)
        torch.testing.assert_close(updates, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, tuple(states), rtol=0, atol=0)


def test_empty_chain_is_identity():
    for tx in (mt.chain(), mt.identity(), mt.named_chain()):
        state = tx.init(PARAMS)
        assert tx.update(GRADS, state, PARAMS)[0] is GRADS
        assert tx.average(PARAMS, state, replicas=mt.Solo())[0] is PARAMS


def test_named_chain():
    tx = mt.named_chain(clip=mt.clip(1.0), inner=mt.sgd(0.1, momentum=0.9))
    state = tx.init(PARAMS)
    assert list(state) == ["clip", "inner"]
    plain = mt.chain(mt.clip(1.0), mt.sgd(0.1, momentum=0.9))
    updates, state = tx.update(GRADS, state, PARAMS)
    expected, _ = plain.update(GRADS, plain.init(PARAMS), PARAMS)
    torch.testing.assert_close(updates, expected, rtol=0, atol=0)
    assert sorted(mt.state_dict(state)) == ["inner.0.count", "inner.0.trace.b", "inner.0.trace.w"]


def test_averages_in_order():
    """`average` runs through the members as `update` does."""

    def add(x):
        return mt.Transform(lambda p: mt.EmptyState(), average=lambda p, s: (p + x, s))

    def times(x):
        return mt.Transform(lambda p: mt.EmptyState(), average=lambda p, s: (p * x, s))

    tx = mt.chain(add(1.0), times(10.0), mt.chain(add(2.0)))
    params, _ = tx.average(torch.tensor(0.0), tx.init(torch.tensor(0.0)))
    assert params == 12.0


def test_state_of_another_transform():
    tx = mt.chain(mt.clip(1.0), mt.sgd(0.1))
    longer = mt.chain(mt.clip(1.0), mt.sgd(0.1), mt.scale(1.0))
    with pytest.raises(ValueError, match=r"3 members but its state has 2"):
        longer.update(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (1, "got 1"),
        (mt.sgd, "sgd.*call it first"),
        (lambda updates: updates, "call it first"),
        ("sgd", "'sgd'"),
        (None, "got None"),
    ],
)
def test_members_that_are_no_transforms(member, words):
    for wrap in (
        mt.chain,
        lambda m: mt.named_chain(a=m),
        lambda m: mt.periodic(m, every=2),
        mt.outer,
        lambda m: mt.local_sgd(m, every=2),
        lambda m: mt.alternate(mt.average_params(), m, every=2),
        lambda m: mt.step(m, GRADS, PARAMS, ()),
    ):
        with pytest.raises(TypeError, match=f"(?s)expected a transform.*{words}"):
            wrap(member)


# --- extra arguments -------------------------------------------------------------------------


def test_extra_arguments_go_to_the_members_that_name_them():
    seen: list = []
    tx = mt.chain(
        mt.sgd(0.1),
        noting("a", seen),
        mt.named_chain(inner=noting("b", seen)),
        mt.periodic(noting("c", seen), every=2),
    )
    state = tx.init(PARAMS)
    params = PARAMS
    for _ in range(2):
        params, state = mt.step(tx, GRADS, params, state, replicas=mt.Solo(), value=7, weight=3)
    updating = [(name, "update", 7) for name in "abc"]
    averaging = [(name, "average", 3) for name in "ab"]
    assert seen == [*updating, *averaging, *updating, *averaging, ("c", "average", 3)]


def test_each_function_takes_its_own():
    """`update` of this chain does not take what only `average` names, and the other way round."""
    seen: list = []
    tx = mt.chain(noting("a", seen, average=False), noting("b", seen, update=False))
    state = tx.init(PARAMS)
    tx.update(GRADS, state, PARAMS, value=1)
    tx.average(PARAMS, state, weight=2)
    assert seen == [("a", "update", 1), ("b", "average", 2)]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'weight'.*value"):
        tx.update(GRADS, state, PARAMS, weight=1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'value'.*weight"):
        tx.average(PARAMS, state, value=1)
    mt.step(tx, GRADS, PARAMS, state, value=1, weight=2)


@pytest.mark.parametrize(
    "tx",
    [
        mt.sgd(0.1),
        mt.chain(mt.clip(1.0), mt.adamw(0.1)),
        mt.local_sgd(mt.sgd(0.1, momentum=0.5), every=2),
        mt.diloco(mt.adamw(0.1), every=2),
        mt.post_local_sgd(mt.sgd(0.1), every=2, warmup=1),
        mt.identity(),
        mt.chain(),
    ],
    ids=["sgd", "chain", "local_sgd", "diloco", "post_local_sgd", "identity", "empty"],
)
def test_typos(tx):
    state = tx.init(PARAMS)
    world = mt.Solo()
    calls = [
        lambda: tx.update(GRADS, state, PARAMS, replicas=world, wieght=1.0),
        lambda: tx.average(PARAMS, state, replicas=world, wieght=1.0),
        lambda: mt.step(tx, GRADS, PARAMS, state, replicas=world, wieght=1.0),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"'wieght'.*replicas, now, donate"):
            call()


def test_a_typo_lists_what_is_accepted():
    tx = mt.local_sgd(mt.sgd(0.1), every=2)
    with pytest.raises(TypeError, match=r"named by members: counts, weight\)"):
        mt.step(tx, GRADS, PARAMS, tx.init(PARAMS), replicas=mt.Solo(), wieght=1.0)


def test_the_contract_is_accepted_everywhere():
    """By functions that do not name it too."""
    tx = mt.Transform(
        lambda params: mt.EmptyState(), lambda updates, state, params=None: (updates, state)
    )
    state = tx.init(PARAMS)
    for name, value in {"replicas": mt.Solo(), "now": True, "donate": False}.items():
        tx.update(GRADS, state, **{name: value})
        tx.average(PARAMS, state, **{name: value})
        mt.chain(tx, mt.sgd(0.1)).update(GRADS, (state, mt.sgd(0.1).init(PARAMS)), **{name: value})
    with pytest.raises(TypeError, match="'value'"):
        tx.update(GRADS, state, value=1)


def test_a_function_may_name_only_a_part_of_the_contract():
    seen = []

    def average(params, state, *, replicas=None):
        seen.append(replicas)
        return params, state

    world = mt.Solo()
    tx = mt.chain(mt.Transform(lambda params: mt.EmptyState(), average=average))
    tx.average(PARAMS, tx.init(PARAMS), replicas=world, now=True, donate=True)
    assert seen == [world]


def test_a_function_that_takes_anything():
    """`**extra` receives all; then a typo cannot be told from an argument."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    tx = mt.chain(mt.Transform(lambda params: mt.EmptyState(), update), mt.sgd(0.1))
    tx.update(GRADS, tx.init(PARAMS), PARAMS, anything=1)
    assert seen == [{"anything": 1}]


def test_params_may_be_passed_by_name():
    tx = mt.chain(mt.add_decayed_weights(1.0), mt.sgd(1.0))
    by_name, _ = tx.update(GRADS, tx.init(PARAMS), params=PARAMS)
    by_position, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    torch.testing.assert_close(by_name, by_position, rtol=0, atol=0)


def test_step_is_three_lines():
    tx = mt.chain(mt.clip(1.0), mt.diloco(mt.sgd(0.1, momentum=0.9), every=2))
    params, state = PARAMS, tx.init(PARAMS)
    expected, expected_state = PARAMS, tx.init(PARAMS)
    world = mt.Solo()
    for _ in range(4):
        params, state = mt.step(tx, GRADS, params, state, replicas=world)
        updates, expected_state = tx.update(GRADS, expected_state, expected, replicas=world)
        expected = mt.apply_updates(expected, updates)
        expected, expected_state = tx.average(expected, expected_state, replicas=world)
    torch.testing.assert_close(params, expected)
    torch.testing.assert_close(state, expected_state)


# --- replicas and levels -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        ("average_params", mt.average_params()),
        ("average_params", mt.periodic(mt.average_params(), every=1)),
        ("average_params", mt.local_sgd(mt.sgd(0.1), every=1)),
        ("mean", mt.diloco(mt.sgd(0.1), every=1)),
        ("mean", mt.chain(mt.mean(), mt.sgd(0.1))),
        ("mean", mt.post_local_sgd(mt.sgd(0.1), every=1, warmup=1)),
        ("average_params", mt.hierarchical_sgd(mt.sgd(0.1), {"node": 1, "world": 2})),
    ],
)
def test_missing_replicas(name, tx):
    with pytest.raises(TypeError, match=rf"^{name} has to communicate: pass replicas"):
        mt.step(tx, GRADS, PARAMS, tx.init(PARAMS))


def test_replicas_may_be_missing_where_nothing_is_due():
    tx = mt.local_sgd(mt.sgd(0.1), every=2)
    params, state = mt.step(tx, GRADS, PARAMS, tx.init(PARAMS))
    with pytest.raises(TypeError, match="replicas"):
        mt.step(tx, GRADS, params, state)


@pytest.mark.parametrize("make", [mt.average_params, mt.mean], ids=["average_params", "mean"])
def test_levels(make):
    name = make.__name__
    levels = {"node": mt.Solo(), "world": mt.Solo()}

    def call(tx, replicas):
        return mt.step(tx, GRADS, PARAMS, tx.init(PARAMS), replicas=replicas)

    call(make("node"), levels)
    call(make(), mt.Solo())
    cases = [
        (make(), levels, r"over=None.*\['node', 'world'\]"),
        (make("rack"), levels, r"over='rack'.*\['node', 'world'\]"),
        (make("node"), mt.Solo(), r"'node'.*mapping.*Solo\(\)"),
        (make("node"), {}, r"over='node'.*\[\]"),
    ]
    for tx, replicas, words in cases:
        with pytest.raises(TypeError, match=f"^{name} .*{words}"):
            call(tx, replicas)


# --- looking into a state --------------------------------------------------------------------


class Mine(NamedTuple):
    inner: Any


def test_find():
    tx = mt.diloco(mt.adamw(0.1), every=3, momentum=0.9)
    state = tx.init(PARAMS)
    assert mt.find(state, mt.PeriodicState) is state[1]
    assert mt.find(state, mt.AdamState) is state[0][0]
    assert mt.find(state, mt.TraceState) is state[1].averager.optimizer[1][0]
    # inside of states of others, of dicts and lists; a state is found in itself
    nested = {"a": [Mine(state)], "b": None}
    assert mt.find(nested, mt.OuterState) is state[1].averager
    assert mt.find(state[1], mt.PeriodicState) is state[1]


def test_find_errors():
    state = mt.chain(mt.trace(0.9), mt.trace(0.5), mt.clip(1.0)).init(PARAMS)
    with pytest.raises(LookupError, match=r"no state of type AdamState.*EmptyState, TraceState"):
        mt.find(state, mt.AdamState)
    with pytest.raises(LookupError, match=r"several states of type TraceState.*find_all"):
        mt.find(state, mt.TraceState)
    with pytest.raises(LookupError, match="no named states"):
        mt.find((1, {"a": torch.ones(1)}), mt.TraceState)


def test_find_all():
    state = mt.chain(mt.trace(0.9), mt.sgd(0.1, momentum=0.5)).init(PARAMS)
    assert [id(s) for s in mt.find_all(state, mt.TraceState)] == [id(state[0]), id(state[1][0])]
    assert mt.find_all(state, mt.AdamState) == []


# --- state dicts -----------------------------------------------------------------------------


def trained(steps=3):
    tx = mt.chain(mt.clip(1.0), mt.diloco(mt.adamw(0.1), every=2))
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = mt.step(tx, GRADS, params, state, replicas=mt.Solo())
    return tx, params, state


def test_state_dict_round_trip(tmp_path):
    tx, params, state = trained()
    torch.save(mt.state_dict(state), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(key) is str for key in saved)
    restored = mt.load_state_dict(tx.init(PARAMS), saved)
    torch.testing.assert_close(restored, state, rtol=0, atol=0)
    # and it goes on as if it had never stopped
    torch.testing.assert_close(
        mt.step(tx, GRADS, params, restored, replicas=mt.Solo()),
        mt.step(tx, GRADS, params, state, replicas=mt.Solo()),
        rtol=0,
        atol=0,
    )


def test_state_dict_has_a_key_of_its_own_for_every_leaf():
    _, _, state = trained()
    saved = mt.state_dict(state)
    assert len(saved) == len(mt.tree.leaves(state))
    for key, leaf in zip(saved, mt.tree.leaves(state), strict=True):
        assert saved[key] is leaf


def test_state_dict_of_ambiguous_names():
    """Names such as `module.named_parameters()` gives, beside nested ones."""
    params = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"same path 'trace\.a\.b'"):
        mt.state_dict(mt.trace(0.9).init(params))


@pytest.mark.parametrize("key", ["name.with.dots", "0"])
def test_state_dict_of_unusual_names(key):
    params = {key: torch.zeros(2), "list": [torch.zeros(1)], "none": None}
    state = mt.trace(0.9).init(params)
    restored = mt.load_state_dict(state, mt.state_dict(state))
    torch.testing.assert_close(restored, state)


def test_load_state_dict_errors():
    tx, _, state = trained()
    template, saved = tx.init(PARAMS), mt.state_dict(state)
    key = "1.0.0.mu.w"
    assert key in saved

    def without(key):
        return {k: v for k, v in saved.items() if k != key}

    cases = [
        (without(key), rf"missing \['{key}'\].*unexpected nothing"),
        ({**saved, "more": torch.ones(1)}, r"missing nothing.*unexpected \['more'\]"),
        ({**saved, key: torch.ones(3)}, rf"'{key}'.*\[3\].*\[2\]"),
        ({**saved, key: saved[key].double()}, rf"'{key}'.*float64.*float32"),
        ({}, "missing"),
    ]
    for bad, words in cases:
        with pytest.raises(ValueError, match=words):
            mt.load_state_dict(template, bad)


# --- optax -----------------------------------------------------------------------------------


def test_optax_members_in_our_chain():
    optax = pytest.importorskip("optax")
    jnp = pytest.importorskip("jax").numpy
    params, grads = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, 4.0])}
    tx = mt.chain(optax.clip_by_global_norm(1.0), mt.local_sgd(optax.adam(0.1), every=2))
    ours = mt.chain(mt.clip_by_global_norm(1.0), mt.local_sgd(mt.adam(0.1), every=2))
    results = []
    for transform in (tx, ours):
        state, trained = transform.init(params), params
        for _ in range(3):
            trained, state = mt.step(transform, grads, trained, state, replicas=mt.Solo())
        results.append(trained["w"])
    assert jnp.allclose(*results, rtol=1e-5)


def test_optax_member_that_takes_a_value():
    """The loss reaches optax's extra arguments through our chain and `step`."""
    optax = pytest.importorskip("optax")
    jnp = pytest.importorskip("jax").numpy
    tx = mt.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    params = {"w": jnp.array([1.0])}
    state = tx.init(params)
    for _ in range(6):
        params, state = mt.step(tx, params, params, state, value=1.0)
    assert float(state[1].scale) < 1.0


def test_ours_in_an_optax_chain():
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    params, grads = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, 4.0])}
    theirs = optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale(-0.1))
    mixed = optax.chain(mt.clip(1.0), mt.trace(0.9), optax.scale(-0.1))
    states = [theirs.init(params), mixed.init(params)]
    for _ in range(3):
        expected, states[0] = theirs.update(grads, states[0], params)
        actual, states[1] = jax.jit(mixed.update)(grads, states[1], params)
        assert jnp.allclose(actual["w"], expected["w"])
    # a whole optimizer of ours inside of theirs
    masked = optax.masked(mt.sgd(0.1), {"w": True})
    assert jnp.allclose(
        masked.update(grads, masked.init(params), params)[0]["w"], -0.1 * grads["w"]
    )


# --- importing -------------------------------------------------------------------------------


def test_import_is_light():
    """`import meantime` brings what is needed and no more."""
    unwanted = ("jax", "optax", "matplotlib", "hypothesis", "typer", "rich", "pytest")
    code = (
        "import sys, meantime, meantime.adapters; "
        f"print([name for name in {unwanted} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
