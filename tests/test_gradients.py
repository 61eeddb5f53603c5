"""`value_and_grad` agrees with torch.func and jax, and says what it does not take."""

import jax
import jax.numpy as jnp
import pytest
import torch

import meantime as mt


def loss(params, x):
    return ((params["w"] * x).sum() - params["b"]) ** 2


def torch_problem():
    return {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.5), "unused": torch.ones(3)}


def test_agrees_with_torch_func():
    params, x = torch_problem(), torch.tensor([3.0, -1.0])
    value, grads = mt.value_and_grad(loss)(params, x)
    expected, expected_value = torch.func.grad_and_value(loss)(params, x)
    assert torch.equal(value, expected_value)
    assert all(torch.equal(grads[name], expected[name]) for name in params)
    assert not value.requires_grad
    assert not params["w"].requires_grad


def test_agrees_with_jax():
    params = {name: jnp.asarray(x.numpy()) for name, x in torch_problem().items()}
    x = jnp.asarray([3.0, -1.0])
    value, grads = jax.jit(mt.value_and_grad(loss))(params, x)
    expected_value, expected = jax.value_and_grad(loss)(params, x)
    assert value == expected_value
    assert all((grads[name] == expected[name]).all() for name in params)


def test_inside_vmap_and_grad():
    params, xs = torch_problem(), torch.tensor([[3.0, -1.0], [0.0, 2.0]])
    values, grads = torch.func.vmap(mt.value_and_grad(loss), in_dims=(None, 0))(params, xs)
    for i, x in enumerate(xs):
        value, grad = mt.value_and_grad(loss)(params, x)
        assert torch.allclose(values[i], value)
        assert torch.allclose(grads["w"][i], grad["w"])

    def gradient_norm(params, x):
        return mt.value_and_grad(loss)(params, x)[1]["w"].square().sum()

    curvature = torch.func.grad(gradient_norm)(params, xs[0])
    assert curvature["w"].abs().sum() > 0


def test_aux_and_argnums():
    def with_aux(x, params):
        value = loss(params, x)
        return value, {"twice": 2 * value}

    params, x = torch_problem(), torch.tensor([3.0, -1.0])
    (value, aux), grads = mt.value_and_grad(with_aux, argnums=1, has_aux=True)(x, params)
    assert torch.equal(aux["twice"], 2 * value)
    assert not aux["twice"].requires_grad
    assert torch.equal(grads["w"], mt.value_and_grad(loss)(params, x)[1]["w"])


def test_leaves_parameters_that_require_gradients_alone():
    model = torch.nn.Linear(2, 1)
    params = dict(model.named_parameters())
    _, grads = mt.value_and_grad(
        lambda p: torch.func.functional_call(model, p, torch.ones(1, 2)).sum()
    )(params)
    assert model.weight.grad is None
    assert grads["weight"].shape == model.weight.shape


@pytest.mark.parametrize(
    ("function", "params", "word"),
    [
        (lambda p: p["w"], {"w": torch.ones(2)}, "scalar"),
        (lambda p: 1.0, {"w": torch.ones(2)}, "scalar"),
        (lambda p: p["n"].sum() * 1.0, {"n": torch.ones(2, dtype=torch.int64)}, "int64"),
    ],
)
def test_errors(function, params, word):
    with pytest.raises(TypeError, match=word):
        mt.value_and_grad(function)(params)
