"""Schedules: parity with optax, for every kind of step, and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meantime import schedules

optax = pytest.importorskip("optax")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

PAIRS = {
    "constant": (schedules.constant(0.3), optax.constant_schedule(0.3)),
    "linear": (schedules.linear(1.0, 0.2, 12), optax.linear_schedule(1.0, 0.2, 12)),
    "linear up": (schedules.linear(0.0, 2.0, 7), optax.linear_schedule(0.0, 2.0, 7)),
    "polynomial": (
        schedules.polynomial(1.0, 0.1, 15, power=2.0),
        optax.polynomial_schedule(1.0, 0.1, 2.0, 15),
    ),
    "polynomial root": (
        schedules.polynomial(0.1, 1.0, 15, power=0.5),
        optax.polynomial_schedule(0.1, 1.0, 0.5, 15),
    ),
    "exponential": (
        schedules.exponential(1.0, 0.5, 6),
        optax.exponential_decay(1.0, 6, 0.5),
    ),
    "exponential bounded": (
        schedules.exponential(1.0, 0.5, 6, end=0.2),
        optax.exponential_decay(1.0, 6, 0.5, end_value=0.2),
    ),
    "exponential growth": (
        schedules.exponential(1.0, 1.0000001, 6, end=3.0),
        optax.exponential_decay(1.0, 6, 1.0000001, end_value=3.0),
    ),
    "cosine": (schedules.cosine(1.0, 20), optax.cosine_decay_schedule(1.0, 20)),
    "cosine end": (schedules.cosine(2.0, 20, end=0.5), optax.cosine_decay_schedule(2.0, 20, 0.25)),
    "warmup_cosine": (
        schedules.warmup_cosine(1.0, warmup=5, steps=25, start=0.1, end=0.01),
        optax.warmup_cosine_decay_schedule(0.1, 1.0, 5, 25, end_value=0.01),
    ),
    "warmup_cosine without warmup": (
        schedules.warmup_cosine(1.0, warmup=0, steps=20),
        optax.cosine_decay_schedule(1.0, 20),
    ),
    "piecewise": (
        schedules.piecewise(1.0, {20: 0.5, 5: 0.1}),
        optax.piecewise_constant_schedule(1.0, {5: 0.1, 20: 0.5}),
    ),
    "join": (
        schedules.join(
            [schedules.linear(0.0, 1.0, 5), schedules.constant(1.0), schedules.cosine(1.0, 10)],
            [5, 12],
        ),
        optax.join_schedules(
            [
                optax.linear_schedule(0.0, 1.0, 5),
                optax.constant_schedule(1.0),
                optax.cosine_decay_schedule(1.0, 10),
            ],
            [5, 12],
        ),
    ),
}
STEPS = [*range(32), 1000, 2**31 - 1]


@pytest.fixture(scope="module")
def expected():
    """By optax, in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        steps = jnp.asarray(STEPS, jnp.float64)
        return {
            name: np.array([float(theirs(step)) for step in steps])
            for name, (_, theirs) in PAIRS.items()
        }
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture(params=PAIRS)
def pair(request, expected):
    """Our schedule and the values it should have at STEPS."""
    return PAIRS[request.param][0], expected[request.param]


def test_python_numbers(pair):
    schedule, values = pair
    found = [schedule(step) for step in STEPS]
    assert all(type(value) is float for value in found)
    np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-15)
    # a step may be a float
    np.testing.assert_allclose([schedule(float(s)) for s in STEPS], values, rtol=1e-12, atol=1e-15)


def test_bounded_growth_does_not_overflow():
    growing = schedules.exponential(1.0, 1.5, 6, end=3.0)
    assert float(growing(torch.tensor(20_000))) == 3.0
    assert growing(20_000) == 3.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_torch_steps(pair, dtype):
    schedule, values = pair
    found = [schedule(torch.tensor(step, dtype=dtype)) for step in STEPS]
    assert all(not isinstance(v, torch.Tensor) or v.shape == () for v in found)
    np.testing.assert_allclose([float(v) for v in found], values, rtol=3e-6, atol=1e-7)


def test_torch_vmap(pair):
    schedule, values = pair
    steps = torch.tensor(STEPS, dtype=torch.int32)
    found = torch.func.vmap(lambda step: schedule(step) + 0.0 * step)(steps)
    np.testing.assert_allclose(found, values, rtol=3e-6, atol=3e-7)


def test_jax(pair):
    """Eagerly, under jit and under vmap of jit."""
    schedule, values = pair
    steps = jnp.asarray(STEPS, jnp.int32)
    for function in (
        lambda steps: [schedule(step) for step in steps],
        lambda steps: [jax.jit(schedule)(step) for step in steps],
        lambda steps: jax.vmap(jax.jit(lambda step: schedule(step) + 0.0 * step))(steps),
    ):
        np.testing.assert_allclose(np.array(function(steps)), values, rtol=1e-5, atol=1e-6)


def test_numpy_steps(pair):
    schedule, values = pair
    found = [float(schedule(np.int64(step))) for step in STEPS]
    np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-15)


def test_compiled(pair):
    schedule, values = pair
    torch._dynamo.reset()
    compiled = torch.compile(schedule, fullgraph=True, backend="eager")
    for i in (0, 3, 8, 30):
        found = float(compiled(torch.tensor(STEPS[i], dtype=torch.int32)))
        np.testing.assert_allclose(found, values[i], rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schedules.linear(0.0, 1.0, 0), "steps.*0"),
        (lambda: schedules.polynomial(0.0, 1.0, -1), "steps.*-1"),
        (lambda: schedules.cosine(1.0, 0), "steps.*0"),
        (lambda: schedules.exponential(1.0, 0.5, 0), "steps.*0"),
        (lambda: schedules.exponential(1.0, 0.0, 5), "rate.*0.0"),
        (lambda: schedules.exponential(1.0, -0.5, 5), "rate.*-0.5"),
        (lambda: schedules.linear(0.0, 1.0, math.nan), "steps.*nan"),
        (lambda: schedules.warmup_cosine(1.0, warmup=10, steps=10), "warmup=10.*steps=10"),
        (lambda: schedules.warmup_cosine(1.0, warmup=-1, steps=10), "warmup=-1"),
        (lambda: schedules.join([schedules.constant(1.0)], [5]), "1 schedules need 0"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [5]), "3 schedules need 2"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [5, 5]), r"increasing.*\[5, 5\]"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [7, 5]), r"increasing.*\[7, 5\]"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()
