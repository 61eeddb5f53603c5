"""`Vmapped`: replicas along an axis of `torch.func.vmap`."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

import meantime as mt

K = 4


class Pair(NamedTuple):
    left: object
    right: object


def stacked_tree(seed: int = 0):
    """A tree of leaves with a leading axis of replicas."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn((K, *shape), generator=make, dtype=torch.float64).to(dtype)

    return {
        "float32": normal(3, 2),
        "float64": normal(5, dtype=torch.float64),
        "bfloat16": normal(4, dtype=torch.bfloat16),
        "float16": normal(4, dtype=torch.float16),
        "complex64": torch.complex(normal(2), normal(2)),
        "int64": torch.arange(K * 2).reshape(K, 2) % 5,
        "bool": torch.eye(K, 3) > 0,
        "0-d": normal(),
        "empty": torch.empty(K, 0, 3),
        "pair": Pair(normal(2), [normal(1), (normal(2, 1),)]),
        "transposed": normal(6, 2).transpose(1, 2),
    }


def numbers(x):
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


def check(actual, function, trees) -> None:
    """`actual` is `function` of every leaf's NumPy array, axes (replica, ...), in its dtype."""

    def one(x, y):
        wanted = torch.from_numpy(np.array(function(numbers(y)))).to(y.dtype)
        torch.testing.assert_close(x.detach(), wanted, equal_nan=True)

    mt.tree.map(one, actual, trees)


def everyone(x):
    return np.broadcast_to(x[None], (len(x), *x.shape))


def mean_of(x, axis=0):
    if np.issubdtype(x.dtype, np.inexact):
        return x.mean(axis, keepdims=True)
    return x.max(axis, keepdims=True)


def test_mean():
    trees = stacked_tree()
    means = vmap(mt.Vmapped(K).mean)(trees)
    check(means, lambda x: np.broadcast_to(mean_of(x), x.shape), trees)
    for leaf in mt.tree.leaves(means):  # the same bits on all replicas
        assert all(torch.equal(row, leaf[0]) for row in leaf)
    assert type(means["pair"]) is Pair


def test_half_precision_accumulates_in_float32():
    x = torch.tensor([60000.0, 6e-8]).half().expand(K, 2)
    assert torch.equal(vmap(mt.Vmapped(K).mean)(x), x)
    x = torch.tensor([[256.0], [4.0], [4.0], [4.0]]).bfloat16()
    assert vmap(mt.Vmapped(K).mean)(x).flatten().tolist() == [67.0] * K


@pytest.mark.parametrize("weights", [[1.0, 2.0, 0.5, 3.0], [3.0, 0.0, 1.0, 2.0], [0.0] * 4])
def test_weighted_mean(weights):
    trees, weight = stacked_tree(), torch.tensor(weights)

    def ruin(x):  # a replica of weight 0 may hold anything
        if not mt.arrays.is_inexact(x):
            return x
        return torch.where((weight > 0).reshape(-1, *[1] * (x.ndim - 1)), x, torch.nan)

    def function(x):
        if not np.issubdtype(x.dtype, np.inexact):
            return np.broadcast_to(mean_of(x), x.shape)
        with np.errstate(invalid="ignore"):
            mean = np.tensordot(np.array(weights), x, 1) / sum(np.float64(w) for w in weights)
        return np.broadcast_to(mean, x.shape)

    actual = vmap(lambda x, w: mt.Vmapped(K).mean(x, weight=w))(mt.tree.map(ruin, trees), weight)
    check(actual, function, trees)


ORDER = [2, 0, 3, 1]


def test_gather_permute_broadcast_rank():
    trees, world = stacked_tree(), mt.Vmapped(K)
    check(vmap(world.gather)(trees), everyone, trees)
    check(vmap(lambda x: world.permute(x, ORDER))(trees), lambda x: x[ORDER], trees)
    for by in (-1, 0, 1, 3, 6):
        check(
            vmap(lambda x, by=by: world.shift(x, by))(trees),
            lambda x, by=by: np.roll(x, by, 0),
            trees,
        )
    for root in range(K):
        actual = vmap(lambda x, root=root: world.broadcast(x, root))(trees)
        check(actual, lambda x, root=root: np.broadcast_to(x[root], x.shape), trees)
    assert vmap(lambda x: world.rank + 0 * x)(torch.zeros(K, dtype=torch.int64)).tolist() == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups(size):
    trees, group = stacked_tree(), mt.Vmapped(K).groups(size)
    assert group.size == size

    def split(x):
        return x.reshape(K // size, size, *x.shape[1:])

    def joined(function):
        return lambda x: function(split(x)).reshape(x.shape)

    check(
        vmap(group.mean)(trees),
        joined(lambda x: np.broadcast_to(mean_of(x, 1), x.shape)),
        trees,
    )
    check(vmap(group.gather)(trees), lambda x: np.repeat(split(x), size, 0), trees)
    check(vmap(lambda x: group.shift(x, 1))(trees), joined(lambda x: np.roll(x, 1, 1)), trees)
    order = list(reversed(range(size)))
    check(vmap(lambda x: group.permute(x, order))(trees), joined(lambda x: x[:, order]), trees)
    root = size - 1
    check(
        vmap(lambda x: group.broadcast(x, root))(trees),
        joined(lambda x: np.broadcast_to(x[:, root : root + 1], x.shape)),
        trees,
    )
    ranks = vmap(lambda x: group.rank + 0 * x)(torch.zeros(K, dtype=torch.int64))
    assert ranks.tolist() == [k % size for k in range(K)]


def test_groups_of_groups():
    x = torch.tensor([0.0, 1.0, 10.0, 30.0])
    pairs = mt.Vmapped(K).groups(2)
    assert torch.equal(vmap(pairs.groups(1).mean)(x), x)
    assert vmap(pairs.groups(2).mean)(x).tolist() == [0.5, 0.5, 20.0, 20.0]


# --- values that all replicas share ----------------------------------------------------------


def test_shared_values():
    """An unbatched value is a value of every replica."""
    world, shared = mt.Vmapped(K), torch.tensor([1.5, -2.0])
    axis = torch.zeros(K)

    def body(_):
        pairs = world.groups(2)
        return (
            world.mean(shared),
            world.gather(shared),
            world.shift(shared, 1),
            world.broadcast(shared, 2),
            pairs.mean(shared),
            pairs.gather(shared),
            pairs.shift(shared, 1),
            world.mean(shared, weight=world.rank * 1.0),
        )

    expected = shared.expand(K, 2)
    results = vmap(body)(axis)
    for i, result in enumerate(results):
        size = {1: K, 5: 2}.get(i)
        wanted = expected if size is None else shared.expand(K, size, 2)
        assert torch.equal(result, wanted), i


# --- differentiation -------------------------------------------------------------------------

COLLECTIVES = {
    # name: (function of the world and a value, its matrix over replicas)
    "mean": (lambda world, x: world.mean(x), np.full((K, K), 1 / K)),
    "shift": (lambda world, x: world.shift(x, 1), np.roll(np.eye(K), 1, 0)),
    "permute": (lambda world, x: world.permute(x, ORDER), np.eye(K)[ORDER]),
    "pairs": (lambda world, x: world.groups(2).mean(x), np.kron(np.eye(2), np.full((2, 2), 0.5))),
    "pair shift": (
        lambda world, x: world.groups(2).shift(x, 1),
        np.kron(np.eye(2), np.roll(np.eye(2), 1, 0)),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_grad_outside_of_vmap(name):
    """The derivative of all replicas' results by all replicas' values."""
    function, matrix = COLLECTIVES[name]
    x = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def total(x):
        return (scale * vmap(lambda x: function(mt.Vmapped(K), x) ** 2)(x)).sum()

    results = matrix @ x.numpy()
    expected = matrix.T @ (2 * scale.numpy() * results)
    np.testing.assert_allclose(grad(total)(x).numpy(), expected, rtol=1e-12)
    # the same by torch.autograd
    leaf = x.clone().requires_grad_()
    total(leaf).backward()
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_grad_inside_of_vmap(name):
    """Each replica differentiates its own result; the collective's transpose is a collective:
    replica k gets the derivative of the sum of all replicas' results by its value."""
    function, matrix = COLLECTIVES[name]
    x = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    actual = vmap(grad(lambda x: function(mt.Vmapped(K), x) ** 2))(x)
    results = matrix @ x.numpy()
    np.testing.assert_allclose(actual.numpy(), matrix.T @ (2 * results), rtol=1e-12)


def test_grad_through_training():
    """The gradient of the last loss by the learning rate, as finite differences have it."""
    targets = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def final(rate):
        tx = mt.diloco(mt.sgd(rate, momentum=0.5), every=2)

        def replica(target):
            params = torch.zeros((), dtype=torch.float64)
            state = tx.init(params)
            for _ in range(5):
                slope = grad(lambda p: (p - target) ** 4)(params)
                params, state = mt.step(tx, slope, params, state, replicas=mt.Vmapped(K))
            return params

        return vmap(replica)(targets).square().sum()

    rate, h = torch.tensor(0.01, dtype=torch.float64), 1e-6
    difference = (final(rate + h) - final(rate - h)) / (2 * h)
    torch.testing.assert_close(grad(final)(rate), difference, rtol=1e-6, atol=0)


# --- nested vmaps ----------------------------------------------------------------------------


@pytest.mark.parametrize("sweep", [3, K])
def test_sweep_outside(sweep):
    """Replicas inside, a sweep (also of the same length) outside."""
    x = torch.arange(sweep * K, dtype=torch.float64).reshape(sweep, K) ** 2
    world = mt.Vmapped(K)
    means = vmap(vmap(world.mean))(x)
    assert torch.equal(means, x.mean(1, keepdim=True).expand(sweep, K))
    assert torch.equal(vmap(vmap(lambda x: world.shift(x, 1)))(x), x.roll(1, 1))
    assert torch.equal(vmap(vmap(world.gather))(x), x[:, None, :].expand(sweep, K, K))
    pairs = x.reshape(sweep, 2, 2).mean(2).repeat_interleave(2, 1)
    assert torch.equal(vmap(vmap(world.groups(2).mean))(x), pairs)
    ranks = vmap(vmap(lambda x: world.rank + 0 * x))(x)
    assert torch.equal(ranks, torch.arange(K).expand(sweep, K).double())


@pytest.mark.parametrize("sweep", [3, K])
def test_sweep_of_a_hyperparameter(sweep):
    """What is swept is batched by the outer vmap only, what replicas hold by the inner one."""
    grads = torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=torch.float64)
    rates = torch.linspace(0.1, 0.5, sweep, dtype=torch.float64)

    def run(rate, g):
        tx = mt.local_sgd(mt.sgd(rate), every=2)
        params = torch.zeros((), dtype=torch.float64)
        state = tx.init(params)
        for _ in range(3):
            params, state = mt.step(tx, g, params, state, replicas=mt.Vmapped(K))
        return params

    actual = vmap(vmap(run, in_dims=(None, 0)), in_dims=(0, None))(rates, grads)
    expected = -rates[:, None] * (2 * grads.mean() + grads)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("sweep", [3, K])
def test_shared_within_a_sweep(sweep):
    """A value of the sweep that its replicas share, and one that everybody shares."""
    x = torch.arange(float(sweep))
    world = mt.Vmapped(K)
    shared = torch.tensor(7.0)

    def run(x):
        return vmap(lambda _: (world.mean(x), world.gather(x), world.mean(shared)))(torch.zeros(K))

    mean, gathered, seven = vmap(run)(x)
    assert torch.equal(mean, x[:, None].expand(sweep, K))
    assert torch.equal(gathered, x[:, None, None].expand(sweep, K, K))
    assert torch.equal(seven, torch.full((sweep, K), 7.0))


def test_inner_vmap_that_is_no_axis_of_replicas():
    """Samples of a replica: the collective stands outside of that vmap."""
    x = torch.randn(K, 5, generator=torch.Generator().manual_seed(0))
    actual = vmap(lambda row: mt.Vmapped(K).mean(vmap(torch.sin)(row)))(x)
    torch.testing.assert_close(actual, x.sin().mean(0).expand(K, 5))


# --- torch.compile ---------------------------------------------------------------------------


def collectives(x, weight):
    world = mt.Vmapped(K)
    pairs = world.groups(2)
    return (
        world.mean(x),
        world.mean(x, weight=weight),
        world.gather(x),
        world.shift(x, 1),
        world.permute(x, ORDER),
        world.broadcast(x, 3),
        pairs.mean(x),
        pairs.gather(x),
        pairs.shift(x, 1),
    )


def test_compiled_collectives():
    x = torch.randn(K, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([1.0, 0.0, 2.0, 3.0])
    function = vmap(collectives)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(function(x, weight), compiled(x, weight), strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("name", ["diloco", "post_local_sgd", "hierarchical", "gossip"])
def test_compiled_steps(name):
    """A step of all replicas, compiled, over steps where nothing and something is due."""
    tx = {
        "diloco": mt.diloco(mt.adamw(0.1), every=2),
        "post_local_sgd": mt.post_local_sgd(mt.sgd(0.1), every=2, warmup=1),
        "hierarchical": mt.hierarchical_sgd(mt.sgd(0.1), {"node": 1, "world": 2}),
        "gossip": mt.chain(mt.sgd(0.1), mt.gossip("exponential")),
    }[name]
    world = mt.Vmapped(K)
    replicas = {"node": world.groups(2), "world": world} if name == "hierarchical" else world
    targets = torch.randn(K, 3, generator=torch.Generator().manual_seed(0))

    def replica(params, state, target):
        slope = grad(lambda p: ((p["w"] - target) ** 2).sum() + p["b"] ** 2)(params)
        return mt.step(tx, slope, params, state, replicas=replicas)

    torch._dynamo.reset()
    step = vmap(replica)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    params = {"w": torch.zeros(K, 3), "b": torch.ones(K)}
    state = vmap(tx.init)(params)
    eager = traced = (params, state)
    for _ in range(4):
        eager, traced = step(*eager, targets), compiled(*traced, targets)
        torch.testing.assert_close(traced, eager)
    assert not torch.equal(eager[0]["w"], params["w"])


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5])
def test_axis_of_another_length(size):
    world = mt.Vmapped(size)
    calls = {
        "mean": world.mean,
        "gather": world.gather,
        "shift": lambda x: world.shift(x, 1),
        "broadcast": world.broadcast,
        "rank": lambda x: world.rank + x,
        "shared": lambda x: world.mean(torch.zeros(2)) + x,
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=rf"Vmapped\({size}\).*length {K}"):
            vmap(call)(torch.zeros(K))


def test_outside_of_vmap():
    world = mt.Vmapped(K)
    for call in (world.mean, world.gather, world.broadcast, lambda x: world.rank + x):
        with pytest.raises(RuntimeError, match=r"Vmapped\(4\).*inside torch\.func\.vmap"):
            call(torch.zeros(2))


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="positive integer"):
        mt.Vmapped(size)


@pytest.mark.parametrize("sources", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], []])
def test_bad_permutations(sources):
    for call in (mt.Vmapped(K).permute, mt.Vmapped(8).groups(K).permute):
        with pytest.raises(ValueError, match=rf"4 replicas once.*{re.escape(repr(sources))}"):
            vmap(lambda x, call=call: call(x, sources))(torch.zeros(K))


@pytest.mark.parametrize("size", [0, 3, -2, 8, 2.0])
def test_bad_groups(size):
    with pytest.raises(ValueError, match=rf"4 replicas .* groups of {size}"):
        mt.Vmapped(K).groups(size)


def test_repr():
    assert repr(mt.Vmapped(4)) == "Vmapped(4)"
    assert repr(mt.Vmapped(4).groups(2)) == "Vmapped(4).groups(2)"


# --- one replica, and records ----------------------------------------------------------------


def test_solo():
    world = mt.Solo()
    values = {"x": torch.tensor([1.0, float("nan")]), "n": torch.tensor([3])}
    assert world.mean(values)["x"] is values["x"]
    assert (world.size, world.rank) == (1, 0)
    assert torch.equal(world.gather(values)["n"], torch.tensor([[3]]))
    assert world.shift(values, 5) is values
    assert world.permute(values, [0]) is values
    assert world.broadcast(values) is values
    assert world.groups(1) is world
    weighted = world.mean(values, weight=torch.tensor(0.0))
    assert weighted["x"].isnan().all()
    assert weighted["x"].dtype == torch.float32
    assert torch.equal(weighted["n"], values["n"])
    for weight in (2.0, torch.tensor(2.0)):
        assert world.mean(values, weight=weight)["x"][0] == 1.0
    with pytest.raises(ValueError, match="root must be 0"):
        world.broadcast(values, 1)
    with pytest.raises(ValueError, match="1 replicas once"):
        world.permute(values, [1])
    with pytest.raises(ValueError, match="1 replicas cannot be split into groups of 2"):
        world.groups(2)


def test_solo_of_weight_zero_as_a_number():
    mean = mt.Solo().mean(torch.ones(2), weight=0.0)
    assert isinstance(mean, torch.Tensor)
    assert mean.isnan().all()


def test_recorded():
    world = mt.Recorded(mt.Solo())
    values = {"x": torch.zeros(3), "n": torch.zeros(2, dtype=torch.int64)}
    world.mean(values)
    world.gather(values)
    world.shift(values["x"], 1)
    world.permute(values["n"], [0])
    world.broadcast({"none": None})
    assert world.calls == [
        ("mean", 28),
        ("gather", 28),
        ("shift", 12),
        ("permute", 16),
        ("broadcast", 0),
    ]
    assert world.bytes == 84
    assert world.seconds > 0
    assert (world.size, world.rank) == (1, 0)
    inner = world.groups(1)
    inner.mean(values)
    assert (len(inner.calls), len(world.calls)) == (1, 5)
