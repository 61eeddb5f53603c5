"""Gradient transforms: parity with torch.optim and optax, hyperparameters, error inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import meantime as mt

STEPS = 100
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCE = {"float32": 3e-6, "float64": 1e-13}


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"bias": rng.normal(size=3), "weight": rng.normal(size=(4, 3)), "x": rng.normal()}


def gradients() -> list[dict[str, np.ndarray]]:
    """Of very different sizes, so that clipping and epsilon matter; the second is zero."""
    rng = np.random.default_rng(1)
    found = []
    for t in range(STEPS):
        size = 0.0 if t == 1 else 10.0 ** rng.uniform(-3, 1.5)
        found.append(
            {k: np.asarray(size * rng.normal(size=np.shape(v))) for k, v in start().items()}
        )
    return found


# --- torch.optim -----------------------------------------------------------------------------


def tensors(tree, dtype):
    return mt.tree.map(lambda x: torch.tensor(x, dtype=dtype), tree)


def by_update(tx, grads, params, state):
    updates, state = tx.update(grads, state, params)
    return mt.apply_updates(params, updates), state


def by_donated_step(tx, grads, params, state):
    return mt.step(tx, grads, params, state, donate=True)


# `step` may use a fused kernel, in place where it is allowed to.
WAYS = {"update": by_update, "step": mt.step, "donated": by_donated_step}


def train(tx, dtype, step=by_update):
    params = tensors(start(), dtype)
    state = tx.init(params)
    for grads in gradients():
        params, state = step(tx, tensors(grads, dtype), params, state)
    return params


def train_torch(make, dtype):
    params = {k: torch.nn.Parameter(v) for k, v in tensors(start(), dtype).items()}
    optimizer = make(params)
    for grads in gradients():
        for k, grad in tensors(grads, dtype).items():
            params[k].grad = grad
        optimizer.step()
    return {k: v.detach() for k, v in params.items()}


def groups_by_decay(params):
    """As everybody writes it: biases do not decay."""
    return [
        {"params": [params["weight"]], "weight_decay": 0.1},
        {"params": [params["bias"], params["x"]], "weight_decay": 0.0},
    ]


MASK = {"bias": False, "weight": True, "x": False}

TORCH = {
    "sgd": (mt.sgd(0.1), lambda p: torch.optim.SGD(p.values(), 0.1)),
    "sgd momentum": (
        mt.sgd(0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p.values(), 0.01, momentum=0.9),
    ),
    "sgd nesterov": (
        mt.sgd(0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p.values(), 0.01, momentum=0.9, nesterov=True),
    ),
    "sgd dampening": (
        mt.sgd(0.01, momentum=0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p.values(), 0.01, momentum=0.9, dampening=0.3),
    ),
    "sgd decay": (
        mt.sgd(0.01, momentum=0.8, dampening=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p.values(), 0.01, momentum=0.8, dampening=0.5, weight_decay=0.1),
    ),
    "sgd decay alone": (
        mt.sgd(0.01, weight_decay=0.2),
        lambda p: torch.optim.SGD(p.values(), 0.01, weight_decay=0.2),
    ),
    "sgd everything": (
        mt.sgd(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p.values(), 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (mt.adam(0.01), lambda p: torch.optim.Adam(p.values(), 0.01)),
    "adam options": (
        mt.adam(0.05, b1=0.5, b2=0.9, eps=1e-3),
        lambda p: torch.optim.Adam(p.values(), 0.05, betas=(0.5, 0.9), eps=1e-3),
    ),
    "adam without moments": (
        mt.adam(0.01, b1=0.0, b2=0.0, eps=1e-2),
        lambda p: torch.optim.Adam(p.values(), 0.01, betas=(0.0, 0.0), eps=1e-2),
    ),
    "adamw": (mt.adamw(0.01), lambda p: torch.optim.AdamW(p.values(), 0.01)),
    "adamw options": (
        mt.adamw(0.05, b1=0.8, b2=0.95, eps=1e-4, weight_decay=0.3),
        lambda p: torch.optim.AdamW(
            p.values(), 0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3
        ),
    ),
    "adamw mask": (
        mt.adamw(0.01, weight_decay=0.1, mask=MASK),
        lambda p: torch.optim.AdamW(groups_by_decay(p), 0.01),
    ),
    "adamw mask function": (
        mt.adamw(
            0.01, weight_decay=0.1, mask=lambda params: mt.tree.map(lambda x: x.ndim >= 2, params)
        ),
        lambda p: torch.optim.AdamW(groups_by_decay(p), 0.01),
    ),
    "adam L2": (
        mt.chain(mt.add_decayed_weights(0.1), mt.adam(0.01)),
        lambda p: torch.optim.Adam(p.values(), 0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_torch(name, dtype, way):
    tx, make = TORCH[name]
    actual, expected = train(tx, DTYPES[dtype], WAYS[way]), train_torch(make, DTYPES[dtype])
    tolerance = TOLERANCE[dtype] * (1 if "adam" not in name else 10)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_torch_schedule():
    """A learning rate that changes: LambdaLR steps after the optimizer."""
    schedule = mt.schedules.warmup_cosine(0.05, warmup=10, steps=80, end=0.001)

    def make(params):
        optimizer = torch.optim.AdamW(params.values(), 1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    expected = train_torch(make, torch.float64)
    for step in WAYS.values():
        actual = train(mt.adamw(schedule), torch.float64, step)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- optax -----------------------------------------------------------------------------------


def optax_pairs():
    optax = pytest.importorskip("optax")
    cosine = mt.schedules.cosine(0.1, 50)
    return {
        "sgd": (mt.sgd(0.1), optax.sgd(0.1)),
        "sgd momentum": (mt.sgd(0.01, 0.9), optax.sgd(0.01, 0.9)),
        "sgd nesterov": (
            mt.sgd(0.01, 0.9, nesterov=True),
            optax.sgd(0.01, 0.9, nesterov=True),
        ),
        "sgd schedule": (mt.sgd(cosine, 0.5), optax.sgd(optax.cosine_decay_schedule(0.1, 50), 0.5)),
        "adam": (mt.adam(0.01), optax.adam(0.01)),
        "scale_by_adam": (
            mt.chain(mt.scale_by_adam(0.8, 0.9, 1e-4), mt.scale(-0.1)),
            optax.chain(optax.scale_by_adam(0.8, 0.9, 1e-4), optax.scale(-0.1)),
        ),
        "adamw": (mt.adamw(0.01, weight_decay=0.1), optax.adamw(0.01, weight_decay=0.1)),
        "adamw mask": (
            mt.adamw(0.01, weight_decay=0.1, mask=MASK),
            optax.adamw(0.01, weight_decay=0.1, mask=MASK),
        ),
        "lion": (mt.lion(0.01), optax.lion(0.01, weight_decay=0.0)),
        "lion options": (
            mt.lion(0.01, b1=0.8, b2=0.95, weight_decay=0.1, mask=MASK),
            optax.lion(0.01, b1=0.8, b2=0.95, weight_decay=0.1, mask=MASK),
        ),
        "clip": (
            mt.chain(mt.clip(0.3), mt.sgd(0.1, 0.9)),
            optax.chain(optax.clip(0.3), optax.sgd(0.1, 0.9)),
        ),
        "clip_by_global_norm": (
            mt.chain(mt.clip_by_global_norm(1.0), mt.sgd(0.1, 0.9)),
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
        ),
        "trace": (
            mt.chain(mt.trace(0.7), mt.trace(0.5, nesterov=True), mt.scale(-0.01)),
            optax.chain(optax.trace(0.7), optax.trace(0.5, nesterov=True), optax.scale(-0.01)),
        ),
        "scale_by_schedule": (
            mt.chain(mt.scale_by_schedule(cosine), mt.scale_by_learning_rate(0.5)),
            optax.chain(
                optax.scale_by_schedule(optax.cosine_decay_schedule(0.1, 50)),
                optax.scale_by_learning_rate(0.5),
            ),
        ),
        "add_decayed_weights": (
            mt.chain(mt.add_decayed_weights(0.1, MASK), mt.sgd(0.05)),
            optax.chain(optax.add_decayed_weights(0.1, MASK), optax.sgd(0.05)),
        ),
    }


OPTAX = [
    "sgd", "sgd momentum", "sgd nesterov", "sgd schedule", "adam", "scale_by_adam", "adamw",
    "adamw mask", "clip", "clip_by_global_norm", "trace", "scale_by_schedule",
    "add_decayed_weights", "lion", "lion options",
]  # fmt: skip


def test_names_of_optax_pairs():
    assert sorted(optax_pairs()) == sorted(OPTAX)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTAX)
def test_optax(name, dtype, x64):
    import jax
    import jax.numpy as jnp

    def train(tx):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), None

        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), start())
        batches = jax.tree.map(lambda *x: jnp.asarray(np.stack(x), dtype), *gradients())
        return jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[0][0])(params, batches)

    ours, theirs = optax_pairs()[name]
    actual, expected = train(ours), train(theirs)
    tolerance = TOLERANCE[dtype] * (10 if "adam" in name else 1)
    if "schedule" in name:
        tolerance = max(tolerance, 1e-6)  # of an int32 counter: float32
    for key in expected:
        assert actual[key].dtype == dtype
        np.testing.assert_allclose(actual[key], expected[key], rtol=tolerance, atol=tolerance)


# --- hyperparameters are numbers, 0-d arrays or schedules --------------------------------------

HYPERPARAMETERS = {
    "sgd.learning_rate": (lambda v: mt.sgd(v), 0.1),
    "sgd.momentum": (lambda v: mt.sgd(0.1, momentum=v), 0.9),
    "sgd.nesterov": (lambda v: mt.sgd(0.1, momentum=v, nesterov=True), 0.9),
    "sgd.dampening": (lambda v: mt.sgd(0.1, momentum=0.9, dampening=v), 0.3),
    "sgd.weight_decay": (lambda v: mt.sgd(0.1, weight_decay=v), 0.2),
    "trace.decay": (mt.trace, 0.7),
    "trace.dampening": (lambda v: mt.trace(0.7, dampening=v), 0.2),
    "adam.learning_rate": (lambda v: mt.adam(v), 0.01),
    "adam.b1": (lambda v: mt.adam(0.1, b1=v), 0.8),
    "adam.b2": (lambda v: mt.adam(0.1, b2=v), 0.99),
    "adam.eps": (lambda v: mt.adam(0.1, eps=v), 1e-3),
    "adamw.learning_rate": (lambda v: mt.adamw(v, weight_decay=0.1), 0.01),
    "adamw.weight_decay": (lambda v: mt.adamw(0.1, weight_decay=v), 0.2),
    "adamw.b1": (lambda v: mt.adamw(0.1, b1=v), 0.8),
    "adamw.b2": (lambda v: mt.adamw(0.1, b2=v), 0.99),
    "adamw.eps": (lambda v: mt.adamw(0.1, eps=v), 1e-3),
    "lion.learning_rate": (lambda v: mt.lion(v), 0.01),
    "lion.b1": (lambda v: mt.lion(0.1, b1=v), 0.8),
    "lion.b2": (lambda v: mt.lion(0.1, b2=v), 0.95),
    "add_decayed_weights": (mt.add_decayed_weights, 0.1),
    "scale_by_learning_rate": (mt.scale_by_learning_rate, 0.1),
    "scale": (mt.scale, -0.3),
    "clip": (mt.clip, 0.3),
    "clip_by_global_norm": (mt.clip_by_global_norm, 0.5),
    "slow_momentum.momentum": (lambda v: mt.slow_momentum(0.1, momentum=v), 0.6),
    "slow_momentum.slow_learning_rate": (
        lambda v: mt.slow_momentum(0.1, slow_learning_rate=v),
        0.7,
    ),
}


def five_updates(tx, params, grads):
    state, found = tx.init(params), []
    for g in grads[:5]:
        updates, state = tx.update(g, state, params)
        found.append(updates)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_of_torch(name, dtype):
    make, value = HYPERPARAMETERS[name]
    dtype = DTYPES[dtype]
    params, grads = tensors(start(), dtype), [tensors(g, dtype) for g in gradients()[:5]]
    expected = five_updates(make(value), params, grads)
    array = torch.tensor(value, dtype=torch.float64)
    forms = {
        "0-d": array,
        "schedule": lambda step: value,
        "schedule of 0-d": lambda step: array,
    }
    for form, hyperparameter in forms.items():
        actual = five_updates(make(hyperparameter), params, grads)
        torch.testing.assert_close(
            actual,
            expected,
            rtol=4e-7 if dtype == torch.float32 else 1e-14,
            atol=0,
            msg=lambda text, form=form: f"{form}: {text}",
        )


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_of_jax(name, x64):
    import jax
    import jax.numpy as jnp

    make, value = HYPERPARAMETERS[name]
    params = jax.tree.map(jnp.asarray, start())
    grads = [jax.tree.map(jnp.asarray, g) for g in gradients()[:5]]
    expected = five_updates(make(value), params, grads)
    # under jit the 0-d array is an argument
    actual = jax.jit(lambda v: five_updates(make(v), params, grads))(jnp.asarray(value))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), actual, expected)
    actual = five_updates(make(lambda step: jnp.asarray(value) + 0 * step), params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), actual, expected)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_schedules_are_read_at_the_number_of_updates(name):
    make, value = HYPERPARAMETERS[name]
    seen: list[int] = []

    def schedule(step):
        seen.append(int(step))
        return value

    params = torch.ones(2)
    five_updates(make(schedule), params, [params] * 5)
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]


# --- dtypes ----------------------------------------------------------------------------------


def bfloat16_transforms():
    rate = mt.schedules.linear(1.0, 0.5, 10)
    for array in (torch.tensor(0.999), torch.tensor(0.999, dtype=torch.float64)):
        yield mt.adamw(rate, b2=array)
        yield mt.adamw(rate, b2=lambda step, array=array: array)
        yield mt.sgd(rate, momentum=array, weight_decay=lambda step: 0.1 + 0 * step)
    yield mt.chain(
        mt.clip_by_global_norm(torch.tensor(1.0)), mt.clip(torch.tensor(0.1)), mt.adam(rate)
    )


@pytest.mark.parametrize("shape", [(3,), ()])
def test_bfloat16_stays(shape):
    """A float32 schedule does not promote anything; also for 0-d parameters."""
    for tx in bfloat16_transforms():
        params = {"w": torch.ones(shape, dtype=torch.bfloat16), "b": torch.ones(shape)}
        state = tx.init(params)
        before = [x.dtype for x in mt.tree.leaves(state)]
        updates, state = tx.update(params, state, params)
        assert updates["w"].dtype == torch.bfloat16
        assert updates["b"].dtype == torch.float32
        assert [x.dtype for x in mt.tree.leaves(state)] == before
        assert mt.apply_updates(params, updates)["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "b2",
    [
        0.999,
        torch.tensor(0.999),
        torch.tensor(0.999, dtype=torch.float64),
        lambda step: torch.tensor(0.999),
        lambda step: 0.999 + 0.0 * step,
    ],
    ids=["number", "float32", "float64", "schedule", "schedule of the step"],
)
def test_b2_is_not_rounded_to_bfloat16(b2, count):
    """0.999 in bfloat16 is 1: the second moment would stay 0. Alone and all leaves at once."""
    params = {f"w{i}": torch.ones(2, dtype=torch.bfloat16) for i in range(count)}
    tx = mt.scale_by_adam(b2=b2)
    state = tx.init(params)
    for t in range(1, 6):
        _, state = tx.update(params, state, params)
        for nu in state.nu.values():
            np.testing.assert_allclose(nu.float(), 1 - 0.999**t, rtol=0.02)


def test_bfloat16_in_jax():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    for b2 in (0.999, jnp.float32(0.999), lambda step: jnp.float32(0.999) + 0 * step):
        tx = mt.adamw(mt.schedules.linear(1.0, 0.5, 10), b2=b2)
        state = tx.init(params)
        updates, state = jax.jit(tx.update)(params, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        nu = mt.find(state, mt.AdamState).nu["w"]
        assert nu.dtype == jnp.bfloat16
        np.testing.assert_allclose(nu.astype(jnp.float32), 0.001, rtol=0.02)


def test_clip_by_global_norm_in_half_precision():
    """The norm of values whose squares overflow and underflow float16."""
    tx = mt.clip_by_global_norm(1.0)
    for size in (30000.0, 1e-6):
        grads = {"a": torch.full((4,), size, dtype=torch.float16), "b": torch.zeros(2).half()}
        updates, _ = tx.update(grads, tx.init(grads))
        expected = 0.5 if size > 1 else float(grads["a"][0])
        assert updates["a"].tolist() == pytest.approx([expected] * 4, rel=1e-3)
        assert updates["a"].dtype == torch.float16


def test_clipping_within_the_bound_is_exact():
    grads = {"a": torch.randn(5, generator=torch.Generator().manual_seed(0)) * 0.01}
    for tx in (mt.clip_by_global_norm(1.0), mt.clip(1.0)):
        assert torch.equal(tx.update(grads, tx.init(grads))[0]["a"], grads["a"])


def test_clipping_passes_nan_on():
    """It is for the mean to see what is not finite."""
    grads = {"a": torch.tensor([1.0, float("nan")])}
    for tx in (mt.clip_by_global_norm(1.0), mt.clip(0.5)):
        assert tx.update(grads, tx.init(grads))[0]["a"].isnan().any()


def test_complex_parameters():
    """SGD on complex parameters is SGD on their real and imaginary parts."""
    z = torch.tensor([1 + 2j, -0.5j])
    pair = torch.view_as_real(z)
    tx = mt.chain(mt.clip_by_global_norm(0.5), mt.sgd(0.1, momentum=0.9, weight_decay=0.1))
    actual, _ = tx.update(z, tx.init(z), z)
    expected, _ = tx.update(pair, tx.init(pair), pair)
    torch.testing.assert_close(torch.view_as_real(actual), expected)


# --- error inputs ----------------------------------------------------------------------------

PARAMS = {"w": torch.ones(2), "b": torch.ones(1)}


def updated(tx, updates=PARAMS, params=PARAMS):
    return tx.update(updates, tx.init(PARAMS), params)


BAD = [
    (lambda: mt.sgd(-0.1), ValueError, "learning_rate.*-0.1"),
    (lambda: mt.sgd(math.nan), ValueError, "learning_rate.*nan"),
    (lambda: mt.sgd("0.1"), TypeError, "learning_rate.*'0.1'"),
    (lambda: mt.sgd(None), TypeError, "learning_rate.*None"),
    (lambda: mt.sgd(True), TypeError, "learning_rate.*True"),
    (lambda: mt.sgd(0.1, momentum=1.5), ValueError, "1.5"),
    (lambda: mt.sgd(0.1, momentum=-0.5), ValueError, "-0.5"),
    (lambda: mt.sgd(0.1, momentum=None), TypeError, "None"),
    (lambda: mt.sgd(0.1, nesterov=True), ValueError, "[Mm]omentum"),
    (lambda: mt.sgd(0.1, 0.9, nesterov=True, dampening=0.1), ValueError, "dampening.*0.1"),
    (lambda: mt.sgd(0.1, weight_decay=-1), ValueError, "weight_decay.*-1"),
    (lambda: mt.sgd(0.1, weight_decay="1"), TypeError, "weight_decay.*'1'"),
    (lambda: mt.trace(2.0), ValueError, "decay.*2.0"),
    (lambda: mt.trace(0.9, nesterov=True, dampening=lambda t: 0.0), ValueError, "dampening"),
    (lambda: mt.adam(-1.0), ValueError, "learning_rate"),
    (lambda: mt.adam(0.1, b1=1.1), ValueError, "b1.*1.1"),
    (lambda: mt.adam(0.1, b2=-0.1), ValueError, "b2.*-0.1"),
    (lambda: mt.adam(0.1, b2=None), TypeError, "b2.*None"),
    (lambda: mt.adam(0.1, eps=-1e-8), ValueError, "eps"),
    (lambda: mt.adamw(0.1, weight_decay=-0.1), ValueError, "weight_decay.*-0.1"),
    (lambda: mt.add_decayed_weights(-0.1), ValueError, "weight_decay.*-0.1"),
    (lambda: mt.scale_by_learning_rate(-0.1), ValueError, "learning_rate.*-0.1"),
    (lambda: mt.clip(0.0), ValueError, "max_value.*0.0"),
    (lambda: mt.clip(-1.0), ValueError, "max_value.*-1.0"),
    (lambda: mt.clip(math.nan), ValueError, "max_value.*nan"),
    (lambda: mt.clip_by_global_norm(0), ValueError, "max_norm.*0"),
    (lambda: updated(mt.add_decayed_weights(0.1), params=None), ValueError, "parameters"),
    (lambda: updated(mt.adamw(0.1), params=None), ValueError, "parameters"),
    (lambda: updated(mt.sgd(0.1, weight_decay=0.1), params=None), ValueError, "parameters"),
    (lambda: updated(mt.sgd(0.1, 0.9), {"w": torch.ones(2)}), ValueError, "structure.*'b'"),
    (lambda: updated(mt.adam(0.1), {**PARAMS, "c": torch.ones(1)}), ValueError, "structure.*'c'"),
    (lambda: updated(mt.adamw(0.1, mask={"w": True})), ValueError, "structure.*'b'"),
    (
        lambda: mt.apply_updates({"w": torch.ones(1)}, {"w": {"v": torch.ones(1)}}),
        ValueError,
        r"structure.*\['w'\]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input(number):
    call, kind, words = BAD[number]
    with pytest.raises(kind, match=f"(?s){words}"):
        call()
