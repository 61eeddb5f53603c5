"""`meantime.jax`: memory shared by DLPack, optax on torch, checkpoints that cross over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import meantime as mt

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

from meantime.jax import optax_on_torch, to_jax, to_torch  # noqa: E402
from meantime.testing import check_transform  # noqa: E402

NARROW = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool", "complex64",
]  # fmt: skip
WIDE = ["float64", "int64", "uint64", "complex128"]


def tensor(dtype: str, *shape: int) -> torch.Tensor:
    bits = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    if dtype.startswith("complex"):
        return (bits + 0.5j * bits).to(getattr(torch, dtype))
    return (bits % 2 if dtype == "bool" else bits).to(getattr(torch, dtype))


def address(x) -> int:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.unsafe_buffer_pointer()


def as_bytes(x: torch.Tensor) -> bytes:
    return (
        x.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def same(array, x: torch.Tensor) -> bool:
    """The same bits of the same dtype and shape."""
    return (
        f"torch.{array.dtype}" == str(x.dtype)
        and array.shape == tuple(x.shape)
        and np.ascontiguousarray(np.asarray(array)).tobytes() == as_bytes(x)
    )


# --- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(3, 5), (0, 2), ()])
def test_shares_memory_both_ways(dtype, shape):
    x = tensor(dtype, *shape)
    array = to_jax({"x": [x]}, copy=False)["x"][0]
    back = to_torch(array, copy=False)
    assert same(array, x)
    assert same(array, back)
    assert x.numel() == 0 or address(x) == address(array) == address(back)


@pytest.mark.parametrize("dtype", WIDE)
def test_half_of_the_bits_is_never_lost(dtype):
    with pytest.raises(ValueError, match=rf"\['x'\].*{dtype}.*jax_enable_x64"):
        to_jax({"ok": torch.ones(1), "x": tensor(dtype, 3)})


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits(dtype, x64):
    x = tensor(dtype, 2, 3)
    assert same(to_jax(x, copy=False), x)
    assert to_torch(to_jax(x)).dtype == x.dtype


BASE = torch.arange(64.0)
VIEWS = {  # the tensor, and whether JAX can use its memory as it is
    "transposed": (BASE.reshape(8, 8).T, True),
    "permuted": (BASE.reshape(2, 4, 8).permute(2, 0, 1), True),
    "channels last": (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
    "parameter": (torch.nn.Parameter(torch.ones(3)), True),
    "aligned offset": (BASE[16:], True),
    "one column": (BASE.reshape(64, 1)[:, :1], True),
    "offset": (BASE[1:], False),
    "strided": (BASE[::2], False),
    "rows": (BASE.reshape(8, 8)[:, 2:4], False),
    "expanded": (torch.ones(1).expand(4), False),
    "conjugated": (torch.tensor([1 + 2j, 3 - 1j]).conj(), False),
    "negated": (torch._neg_view(torch.arange(4.0)), False),
    "imaginary part": (torch.tensor([1 + 2j, 3 - 1j]).conj().imag, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    x, shares = VIEWS[name]
    assert same(to_jax(x), x)
    assert (address(to_jax(x)) == address(x)) == shares
    copied = to_jax(x, copy=True)
    assert same(copied, x)
    assert address(copied) != address(x)
    if shares:
        assert torch.equal(to_torch(to_jax(x, copy=False)), x)
    else:
        with pytest.raises(ValueError, match="needs a copy"):
            to_jax(x, copy=False)


def test_arrays_of_transposed_memory_are_used_rightly():
    x = torch.arange(6.0).reshape(2, 3).T
    y = jax.jit(lambda a: a @ a.T + 1)(to_jax(x, copy=False))
    np.testing.assert_array_equal(y, x @ x.T + 1)


def test_a_copy_is_not_written_through():
    x, array = torch.zeros(3), jnp.zeros(3)
    copies = to_jax(x, copy=True), to_torch(array, copy=True)
    x.fill_(1.0)
    copies[1].fill_(1.0)
    assert copies[0].tolist() == array.tolist() == [0.0] * 3
    shared = to_torch(array)
    shared.fill_(2.0)  # what the documentation warns of
    assert array.tolist() == [2.0] * 3


def test_donation_in_jax_leaves_the_tensor_alone():
    x = torch.arange(1000.0)
    jax.jit(lambda a: a + 1, donate_argnums=0)(to_jax(x, copy=False)).block_until_ready()
    assert torch.equal(x, torch.arange(1000.0))


def functorch_tensor() -> torch.Tensor:
    seen = []
    torch.func.vmap(lambda x: seen.append(x) or x)(torch.ones(2))
    return seen[0]


def sharded():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(
        jnp.zeros(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )


BAD = {
    "number": (to_jax, lambda: 1.0, TypeError, "float, not a plain torch tensor"),
    "array": (to_jax, lambda: jnp.ones(1), TypeError, "not a plain torch tensor"),
    "in torch.func": (to_jax, functorch_tensor, TypeError, "torch.func"),
    "derivative": (to_jax, lambda: torch.ones(1, requires_grad=True) * 2, ValueError, "detach"),
    "sparse": (to_jax, lambda: torch.eye(2).to_sparse(), BufferError, "layout"),
    "meta": (to_jax, lambda: torch.ones(1, device="meta"), ValueError, "meta"),
    "tensor": (to_torch, lambda: torch.ones(1), TypeError, "not a JAX array"),
    "key": (to_torch, lambda: jax.random.key(0), TypeError, "key_data"),
    "int4": (to_torch, lambda: jnp.ones(2, jnp.int4), TypeError, "int4"),
    "float8_e3m4": (to_torch, lambda: jnp.ones(2, jnp.float8_e3m4), TypeError, "float8_e3m4"),
    "sharded": (to_torch, sharded, ValueError, "2 devices"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_cross(name):
    convert, make, error, words = BAD[name]
    with pytest.raises(error, match=rf"{convert.__name__}: \['a'\]\[1\] .*{words}"):
        convert({"a": [None, make()], "b": None})


def test_inside_jit():
    with pytest.raises(TypeError, match="no value inside a JAX transformation"):
        jax.jit(to_torch)(jnp.ones(2))


# --- optax on torch --------------------------------------------------------------------------

OPTAX = {
    "adamw": lambda: optax.adamw(0.01),
    "identity": optax.identity,  # returns what it was given
    "noisy": lambda: optax.noisy_sgd(0.1, key=1),  # has a random key in its state
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "prodigy": optax.contrib.prodigy,
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 0, p)
    ),
}


def key_data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("name", OPTAX)
def test_optax_on_torch_is_optax(name):
    """The same bits, compiled once."""
    transformation, traces = OPTAX[name](), []

    def update(*arguments):
        traces.append(0)
        return transformation.update(*arguments)

    tx = optax_on_torch(optax.GradientTransformation(transformation.init, update))
    params = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "s": torch.tensor(0.5)}
    state = tx.init(params)
    theirs = to_jax(params, copy=True)
    their_state, their_update = transformation.init(theirs), jax.jit(transformation.update)
    for _ in range(4):
        updates, state = tx.update(params, state, params)
        params = mt.apply_updates(params, updates)
        their_updates, their_state = their_update(theirs, their_state, theirs)
        theirs = optax.apply_updates(theirs, their_updates)
    assert len(traces) == 1
    their_state = jax.tree.map(key_data, their_state)
    for x, y in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((theirs, their_state)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", OPTAX)
def test_optax_on_torch_keeps_the_laws(name):
    """Purity, memory of its own, donation, checkpoints and the rest of the battery; but optax
    takes arguments that nobody names, and torch does not look into JAX's program."""
    not_ours = ("keywords", "vectorises", "differentiates", "compiles", "runs_on_jax")
    params = {"w": torch.linspace(-1, 1, 6).reshape(2, 3), "s": torch.tensor(0.5), "n": None}
    check_transform(optax_on_torch(OPTAX[name]()), params=params, examples=3, skip=not_ours)


def test_optax_on_torch_shares_no_memory():
    params = {"w": torch.ones(64), "b": torch.ones(64)}
    tx = optax_on_torch(optax.chain(optax.identity(), optax.ema(0.9), optax.trace(0.9)))
    state = tx.init(params)
    updates, new = tx.update(params, state, params)
    every = mt.tree.leaves((params, state, updates, new))
    assert len({x.data_ptr() for x in every}) == len(every)


def test_optax_on_torch_in_a_recipe_with_an_extra_argument():
    results = []
    for inner, params in (
        (optax_on_torch(optax.polyak_sgd()), torch.tensor([3.0, -2.0])),
        (optax.polyak_sgd(), jnp.array([3.0, -2.0])),
    ):
        tx = mt.diloco(inner, every=2)
        state = tx.init(params)
        for _ in range(4):
            params, state = mt.step(
                tx,
                params,
                params + 0,
                state,
                replicas=mt.Solo(),
                value=(params * params).sum() / 2,
                donate=True,
            )
        results.append(np.asarray(params))
    np.testing.assert_allclose(*results, rtol=1e-6)
    assert np.abs(results[0]).max() < 3.0


# --- checkpoints -----------------------------------------------------------------------------


def recipe():
    return mt.diloco(mt.adamw(0.05, weight_decay=0.1), every=4)


def run(params, state, steps):
    """Steps with the gradient of |w|^2 / 2 + sin(b)."""
    for _ in range(steps):
        cos = torch.cos if isinstance(params["b"], torch.Tensor) else jnp.cos
        grads = {"w": params["w"], "b": cos(params["b"])}
        params, state = mt.step(recipe(), grads, params, state, replicas=mt.Solo())
    return params, state


@pytest.mark.parametrize("to_other", [to_jax, to_torch])
def test_checkpoints_cross_over_in_the_middle_of_a_round(to_other):
    start = {"w": torch.linspace(-1, 1, 6).reshape(2, 3), "b": torch.tensor(0.5)}
    start = start if to_other is to_jax else to_jax(start)
    all_the_way, expected = run(start, recipe().init(start), 11)

    params, state = run(start, recipe().init(start), 6)
    params, saved = to_other((params, mt.state_dict(state)), copy=True)
    state = mt.load_state_dict(recipe().init(params), saved)
    params, state = run(params, state, 5)

    assert mt.find(state, mt.PeriodicState).count == 11
    assert jax.tree.structure((params, state)) == jax.tree.structure((all_the_way, expected))
    for x, y in zip(
        mt.tree.leaves((params, state)), mt.tree.leaves((all_the_way, expected)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=3e-6, atol=1e-7)
