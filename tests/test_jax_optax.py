"""optax inside ours, ours inside optax, parity with optax, and faults of it that are not ours."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import meantime as mt
from tests.test_jax_transforms import ZOO, arrays, assert_close, levels
from tests.test_optimizers import OPTAX, optax_pairs, start

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

SOLO = mt.Solo()


def value_of(params):
    return sum(((x - 1) ** 2).sum() for x in jax.tree.leaves(params)) / 4


gradient = jax.grad(value_of)


# --- optax inside ours -----------------------------------------------------------------------


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)


INSIDE = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lion": lambda: optax.lion(0.1),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.ema(0.9), optax.adam(0.1)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.3)), ("adam", optax.adam(0.1))),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 0, p)
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(0.1), "other": optax.set_to_zero()}, labels
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.01, 4)
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.sgd(0.1), lambda step: step % 2 == 0
    ),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "polyak_sgd": optax.polyak_sgd,
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    ),
    "dadapt_adamw": optax.contrib.dadapt_adamw,
    "prodigy": optax.contrib.prodigy,
    "momo": optax.contrib.momo,
    "cocob": optax.contrib.cocob,
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "muon": lambda: optax.contrib.muon(0.1),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
}


NEEDS_VALUE = {"polyak_sgd", "reduce_on_plateau", "momo"}


def by_hand(tx, extra, params):
    """Two rounds of two steps with an optimizer of optax, and one more on what each round did."""

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params), state, params, **extra(params))
        return (optax.apply_updates(params, updates), state), None

    def round_(carry, _):
        anchor, inner_state, outer_state = carry
        (params, inner_state), _ = jax.lax.scan(step, (anchor, inner_state), None, length=2)
        delta = jax.tree.map(jnp.subtract, anchor, params)
        updates, outer_state = tx.update(delta, outer_state, anchor, **extra(params))
        return (optax.apply_updates(anchor, updates), inner_state, outer_state), None

    carry = params, tx.init(params), tx.init(params)
    return without_keys(jax.lax.scan(round_, carry, None, length=2)[0])


def by_ours(tx, extra, params):
    tx = mt.chain(tx, mt.periodic(mt.outer(mt.chain(mt.mean(), tx)), every=2))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params), state, params, replicas=SOLO, **extra(params))
        params = mt.apply_updates(params, updates)
        return tx.average(params, state, replicas=SOLO, **extra(params)), None

    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=4)
    return without_keys((params, state[0], mt.find(state[1], mt.OuterState).optimizer[1]))


def without_keys(values):
    def numbers(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(numbers, values)


@pytest.mark.parametrize("name", INSIDE)
def test_inner_and_outer_optimizer(name, quick_compilation):
    def extra(params):
        return {"value": value_of(params)} if name in NEEDS_VALUE else {}

    both = [partial(f, INSIDE[name](), extra) for f in (by_ours, by_hand)]
    assert_close(*jax.jit(lambda params: [f(params) for f in both])(arrays()), 2e-5)


def test_lookahead_keeps_its_two_sets_of_parameters():
    """An optimizer whose parameters are a pair, and whose gradients are those of one of it."""
    tx = mt.chain(
        optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
        mt.periodic(mt.average_params(), every=2),
    )
    params = optax.LookaheadParams.init_synced(jnp.array([3.0, -2.0]))
    state = tx.init(params)
    for _ in range(2):
        params, state = mt.step(tx, params.fast, params, state, replicas=SOLO)
    np.testing.assert_allclose(params.slow, [3 * 0.905, -2 * 0.905], rtol=1e-6)
    np.testing.assert_allclose(params.fast, params.slow, rtol=1e-6)


# --- ours inside optax -----------------------------------------------------------------------


def runs(tx, replicas, grads, params):
    """The updates of every step, and the last state."""
    state = tx.init(params)
    extra = {} if replicas is None else {"replicas": replicas}

    def body(state, g):
        updates, state = tx.update(g, state, params, **extra)
        return state, updates

    state, updates = jax.lax.scan(body, state, grads)
    return updates, state


def within_optax(tx):
    """What each of optax's combinators makes of a transform, where all act as the transform."""
    everything = partial(jax.tree.map, lambda _: True)
    return {
        "chain": optax.chain(optax.identity(), tx, optax.identity()),
        "named_chain": optax.named_chain(("first", tx), ("second", optax.identity())),
        "masked": optax.masked(tx, everything),
        "partition": optax.partition(
            {"all": tx, "none": optax.set_to_zero()}, partial(jax.tree.map, lambda _: "all")
        ),
        "MultiSteps": optax.MultiSteps(tx, 1),
        "apply_if_finite": optax.apply_if_finite(tx, 3),
    }


@pytest.mark.parametrize("name", [name for name, make in ZOO.items() if make().updates])
def test_ours_within_optax(name, quick_compilation):
    tx, replicas = ZOO[name](), levels(name, SOLO, SOLO)
    # How optax is told of a transform that takes extra arguments, here the replicas.
    member = optax.GradientTransformationExtraArgs(tx.init, tx.update)

    @jax.jit
    def everywhere(params, grads):
        expected, _ = runs(tx, replicas, grads, params)
        ways = within_optax(member).items()
        return expected, {way: runs(theirs, replicas, grads, params)[0] for way, theirs in ways}

    expected, found = everywhere(arrays(), arrays(3, seed=1))
    for updates in found.values():
        assert_close(updates, expected)


def test_ours_as_it_is_within_optax():
    """Without extra arguments a transform is a member as it is, of whatever takes members."""
    tx, params, grads = mt.adamw(0.1), arrays(), arrays(3, seed=1)
    expected, _ = runs(tx, None, grads, params)
    for theirs in within_optax(tx).values():
        assert_close(jax.jit(partial(runs, theirs, None))(grads, params)[0], expected)


def test_multi_steps_accumulates_for_ours():
    tx, params, grads = mt.adamw(0.1), arrays(), arrays(4, seed=1)
    (updates, state) = runs(optax.MultiSteps(tx, 2), None, grads, params)
    halves = jax.tree.map(lambda g: (g[0::2] + g[1::2]) / 2, grads)
    expected, _ = runs(tx, None, halves, params)
    assert_close(jax.tree.map(lambda u: u[1::2], updates), expected)
    assert int(state.inner_opt_state[0].count) == 2


def test_a_step_that_optax_rejects_never_happened():
    tx, params, grads = mt.adamw(0.1), arrays(), arrays(4, seed=1)
    kept = jnp.array([0, 1, 3])
    expected, _ = runs(tx, None, jax.tree.map(lambda g: g[kept], grads), params)
    grads["w"] = grads["w"].at[2, 0, 0].set(jnp.nan)
    updates, _ = runs(optax.apply_if_finite(tx, 5), None, grads, params)
    assert_close(jax.tree.map(lambda u: u[kept], updates), expected)
    assert all((u[2] == 0).all() for u in jax.tree.leaves(updates))


def test_what_communicates_is_not_silent_within_optax():
    """optax hands extra arguments to those members that are declared to take them."""
    tx, params = mt.chain(mt.mean(), mt.sgd(0.1)), arrays()
    theirs = optax.chain(optax.clip(1.0), tx)
    with pytest.raises(TypeError, match="mean has to communicate"):
        theirs.update(params, theirs.init(params), params, replicas=SOLO)


# --- parity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTAX)
def test_parity_over_200_steps(name, dtype):
    """On a problem whose solution is approached: rounding errors do not grow."""

    @jax.jit
    def train(params, noise):
        def body(carry, noise):
            found = []
            for tx, (params, state) in zip(optax_pairs()[name], carry, strict=True):
                grads = jax.tree.map(lambda p, n: p + n, params, noise)
                updates, state = tx.update(grads, state, params)
                found.append((optax.apply_updates(params, updates), state))
            return found, [params for params, _ in found]

        carry = [(params, tx.init(params)) for tx in optax_pairs()[name]]
        return jax.lax.scan(body, carry, noise)[1]

    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), start())
    noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(200, *x.shape)), dtype), params)
    ours, theirs = train(params, noise)
    for key, expected in theirs.items():
        assert ours[key].dtype == expected.dtype == dtype
        a, b = (np.asarray(x, np.float64) for x in (ours[key], expected))
        scale = np.abs(b).max()
        tolerance = {"float32": 3e-5, "bfloat16": 0.1}[dtype]
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=key)


# --- cost ------------------------------------------------------------------------------------

EVERY = 50


def diloco_by_hand():
    inner, outer = optax.adamw(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)

    def init(params):
        return inner.init(params), params, outer.init(params), jnp.zeros((), jnp.int32)

    def step(grads, state, params):
        inner_state, anchor, outer_state, count = state
        updates, inner_state = inner.update(grads, inner_state, params)
        params, count = optax.apply_updates(params, updates), count + 1

        def synchronise(params, anchor, outer_state):
            delta = jax.tree.map(jnp.subtract, anchor, params)
            updates, outer_state = outer.update(delta, outer_state, anchor)
            anchor = optax.apply_updates(anchor, updates)
            return anchor, anchor, outer_state

        params, anchor, outer_state = jax.lax.cond(
            count % EVERY == 0, synchronise, lambda *same: same, params, anchor, outer_state
        )
        return params, (inner_state, anchor, outer_state, count)

    return init, step


def of_optax(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def of_ours(tx):
    return tx.init, lambda grads, state, params: mt.step(tx, grads, params, state, replicas=SOLO)


COSTS = {
    "adamw": lambda: (of_ours(mt.adamw(1e-3)), of_optax(optax.adamw(1e-3))),
    "clipped": lambda: (
        of_ours(mt.chain(mt.clip_by_global_norm(1.0), mt.adamw(1e-3))),
        of_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))),
    ),
    "diloco": lambda: (of_ours(mt.diloco(mt.adamw(1e-3), every=EVERY)), diloco_by_hand()),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_what_optax_and_loops_by_hand_cost(name):
    """As XLA counts, who adds up both branches of a conditional. What the mean does more than a
    loop by hand (it looks whether messages are finite) it does once a round."""
    params = {f"{i}": jnp.ones((128, 128)) for i in range(3)}
    ours, theirs = (
        jax.jit(step, donate_argnums=(1, 2)).lower(params, init(params), params).compile()
        for init, step in COSTS[name]()
    )
    share = EVERY if name == "diloco" else 1
    for measure in ("flops", "bytes accessed"):
        a, b = (program.cost_analysis()[measure] for program in (ours, theirs))
        assert (a - b) / share <= 0.03 * b, measure


# --- faults of optax 0.2.8 -------------------------------------------------------------------

faulty = optax.__version__ == "0.2.8"


def test_inner_rule_and_collectives_run_only_when_due():
    """optax.MultiSteps runs the inner update, collectives included, on every mini-step.

    Here accumulation is local steps: what is not due is not computed.
    """
    calls = []

    def noisy(x):
        calls.append(1)
        return x

    def update(updates, state, params=None):
        return jax.tree.map(
            lambda u: jax.pure_callback(noisy, jax.ShapeDtypeStruct(u.shape, u.dtype), u), updates
        ), state

    params, grads = jnp.ones(2), jnp.ones((8, 2))
    observed = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    jax.jit(partial(runs, optax.MultiSteps(observed, 4), None))(grads, params)
    jax.effects_barrier()
    assert len(calls) == 8 or not faulty
    calls.clear()
    ours = mt.chain(mt.sgd(0.1), mt.periodic(mt.outer(mt.chain(mt.mean(), observed)), every=4))
    step = jax.jit(lambda p, s, g: mt.step(ours, g, p, s, replicas=SOLO))
    state = ours.init(params)
    for g in grads:
        params, state = step(params, state, g)
    jax.block_until_ready(params)
    assert len(calls) == 2


def test_a_round_that_is_not_over_leaks_no_nan():
    """optax.lookahead multiplies what it does not take by 0, and 0 * nan is nan."""
    fast, slow = jnp.array([1.0]), jnp.array([jnp.nan])
    theirs = optax.lookahead(optax.sgd(0.1), sync_period=4, slow_step_size=0.5)
    pair = optax.LookaheadParams(fast, slow)
    updates, _ = theirs.update(fast, theirs.init(pair), pair)
    assert jnp.isnan(updates.fast).all() or not faulty

    ours = mt.chain(mt.sgd(0.1), mt.periodic(mt.outer(mt.sgd(0.5)), every=4))
    state = ours.init(slow)  # the anchor is nan
    step = jax.jit(lambda p, s: mt.step(ours, p, p, s, replicas=SOLO))
    for _ in range(3):
        fast, state = step(fast, state)
    np.testing.assert_allclose(fast, [0.9**3], rtol=1e-6)


def test_hyperparameters_do_not_take_the_precision_of_the_parameters():
    """optax.inject_hyperparams casts b2 = 0.999 to bfloat16, which makes it 1."""
    params = jnp.ones(4, jnp.bfloat16)
    theirs = optax.inject_hyperparams(optax.adamw)(0.01)
    updates, _ = theirs.update(params, theirs.init(params), params)
    assert jnp.isnan(updates).all() or not faulty

    scheduled = mt.adamw(
        mt.schedules.constant(0.01),
        b2=mt.schedules.constant(0.999),
        weight_decay=mt.schedules.constant(0.1),
    )
    plain = mt.adamw(0.01, weight_decay=0.1)
    (updates, _), (expected, _) = (
        runs(tx, None, jnp.stack([params] * 3), params) for tx in (scheduled, plain)
    )
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (updates, expected)))


def test_the_structure_of_a_state_is_that_of_init():
    """optax.monitor makes a state whose dict of measurements is empty, and fills it in update.

    Ours: `test_a_step_keeps_every_type`, for every transform; here, for a member that measures.
    """
    params, theirs = jnp.ones(2), optax.monitor({"norm": optax.tree.norm})
    state = theirs.init(params)
    _, after = theirs.update(params, state, params)
    assert jax.tree.structure(state) != jax.tree.structure(after) or not faulty

    def update(updates, state, params=None):
        return updates, {"norm": mt.tree.global_norm(updates)}

    measure = mt.Transform(lambda params: {"norm": jnp.zeros(())}, update)
    _, state = runs(mt.chain(measure, mt.sgd(0.1)), None, jnp.ones((3, 2)), params)
    np.testing.assert_allclose(state[0]["norm"], 2**0.5, rtol=1e-6)


def test_misspelt_arguments_are_refused():
    """optax.chain hands `valeu` to nobody, and says nothing."""
    params = jnp.ones(2)
    theirs = optax.adam(0.1)
    theirs.update(params, theirs.init(params), params, valeu=1.0)
    ours = mt.diloco(mt.adam(0.1), every=2)
    with pytest.raises(TypeError, match="valeu"):
        ours.update(params, ours.init(params), params, valeu=1.0)
    with pytest.raises(TypeError, match="valeu"):
        mt.step(ours, params, params, ours.init(params), replicas=SOLO, valeu=1.0)
