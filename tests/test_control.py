"""One of several branches, in every world."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from meantime.control import switch


def scaled(index, x):
    """`(index + 1) x`, by a branch for each index."""
    branches = [lambda x, y, i=i: ({"x": (i + 1) * x["x"]}, y) for i in range(5)]
    return switch(index, branches, {"x": x}, x)[0]["x"]


@pytest.mark.parametrize("index", range(5))
def test_switch(index):
    x = torch.arange(3.0)
    for value in (index, torch.tensor(index, dtype=torch.int32)):
        assert torch.equal(scaled(value, x), (index + 1) * x)


def test_switch_runs_one_branch():
    ran = []
    branches = [lambda x, i=i: ran.append(i) or x for i in range(6)]
    for index in range(6):
        switch(torch.tensor(index), branches, torch.ones(1))
    assert ran == list(range(6))


def test_switch_in_vmap():
    """Of an index that differs along the axis."""
    index, x = torch.tensor([4, 0, 2]), torch.ones(3, 2)
    assert torch.equal(vmap(scaled)(index, x), (index[:, None] + 1) * x)


def test_switch_compiles():
    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for index in range(5):
        found = compiled(torch.tensor(index), torch.ones(2))
        assert torch.equal(found, torch.full((2,), index + 1.0))


def test_switch_in_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(3.0)
    jitted = jax.jit(scaled)
    for index in range(5):
        assert jitted(index, x).tolist() == [0, index + 1, 2 * (index + 1)]
    batched = jax.vmap(scaled, in_axes=(0, None))(jax.numpy.arange(5), x)
    assert batched[:, 1].tolist() == [1, 2, 3, 4, 5]
